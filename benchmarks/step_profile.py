"""What a step spends its time on: five prefill and five decode steps, profiled through the engine's own API.

python benchmarks/step_profile.py [--picture docs/step.png]

Prints the share of each kind of work, and draws it. Of a step's time, an operator's belongs to the part of
the model that called it; all time in which no operator runs is the host's: Python, and recording the profile.
Between two steps the next is scheduled; that is not in it.
"""

import functools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from common import arguments, describe, model_directory, table

PARTS = {  # function of the engine, where it is called from -> kind of work
    "tokenspeed_rl.models.decoder.mlp": "MLP",
    "tokenspeed_rl.models.decoder.project": "projections",
    "tokenspeed_rl.models.decoder.linear": "output head",
    "tokenspeed_rl.models.decoder.attention": "attention",
    "tokenspeed_rl.models.decoder.add_rms_norm": "norms",
    "tokenspeed_rl.core.model_runner.sample": "sampling",
}
KINDS = (*PARTS.values(), "other operators", "host")
COLOURS = ("#1f4e79", "#3f7cb8", "#7fb0dc", "#d9662b", "#5f9a3c", "#a03f8c", "#a5a5a5", "#d9d9d9")
STEPS = 5
SAMPLES, PROMPTS, PROMPT_TOKENS = 8, 4, 128


@contextmanager
def marked() -> Iterator[None]:
    """Within, the profiler sees each of PARTS as a stretch with the name of its kind."""
    from torch.profiler import record_function

    def mark(function: Any, kind: str) -> Any:
        @functools.wraps(function)
        def inside(*values: Any, **named: Any) -> Any:
            with record_function(kind):
                return function(*values, **named)

        return inside

    import importlib

    patches = []
    for path, kind in PARTS.items():
        module, _, name = path.rpartition(".")
        function = getattr(importlib.import_module(module), name)
        patches.append(patch(path, mark(function, kind)))
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def profile(model: Path, folder: Path) -> list[str]:
    """Groups of prompts with several samples each, as a rollout has them; the traces of both stages."""
    import torch

    from tokenspeed_rl import Engine

    with Engine(str(model), device="cpu", max_total_tokens=8192, enable_prefix_caching=False) as engine:
        vocab = engine.client.model_config.vocab_size
        generator = torch.Generator().manual_seed(0)

        def roll() -> None:
            prompts = torch.randint(vocab, (PROMPTS, PROMPT_TOKENS), generator=generator)
            params = {"n": SAMPLES, "max_new_tokens": 3, "ignore_eos": True}
            engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)

        roll()
        engine.start_profile(str(folder), num_steps=STEPS, profile_by_stage=True)
        for _ in range(STEPS):
            roll()
        return engine.stop_profile()


def shares(path: str) -> tuple[dict[str, float], int]:
    """Of all steps of a trace: seconds per kind, and how many steps there were."""
    events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
    timed = [e for e in events if e.get("ph") == "X" and e.get("cat") in ("user_annotation", "cpu_op")]
    spent: Counter[str] = Counter()
    around: list[dict[str, Any]] = []  # what the event lies in, the outermost first
    for event in sorted(timed, key=lambda e: (e["ts"], -e["dur"])):
        while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
            around.pop()
        if event["cat"] == "cpu_op" and not any(e["cat"] == "cpu_op" for e in around):
            kind = next((e["name"] for e in reversed(around) if e["name"] in KINDS), "other operators")
            spent[kind] += event["dur"]
        around.append(event)
    steps = [e for e in timed if e["name"].startswith(("prefill[", "decode["))]
    spent["host"] = sum(e["dur"] for e in steps) - sum(spent.values())
    return {kind: spent[kind] / 1e6 for kind in KINDS}, len(steps)


def draw(found: dict[str, dict[str, float]], picture: Path, caption: str) -> None:
    """A bar for each stage, cut into kinds of work."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 3.1), dpi=100)
    for place, seconds in enumerate(found.values()):
        left, total = 0.0, sum(seconds.values())
        for kind, colour in zip(KINDS, COLOURS, strict=True):
            width = 100 * seconds[kind] / total
            axes.barh(place, width, left=left, color=colour, label=None if place else kind, height=0.62)
            if width >= 3:
                ink = "black" if kind in ("host", "other operators") else "white"
                axes.text(left + width / 2, place, f"{width:.0f}", ha="center", va="center", color=ink)
            left += width
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of a step's time")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=9)
    figure.text(0.99, 0.01, caption, ha="right", fontsize=7, color="#606060")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(picture)


def main() -> int:
    """Print the table, and draw it if asked to."""
    parser = arguments(__doc__)
    parser.add_argument("--picture", type=Path, help="a PNG to draw")
    options = parser.parse_args()

    import torch

    torch.set_num_threads(options.threads)
    machine = describe(options.threads)
    print(machine)
    with tempfile.TemporaryDirectory() as scratch, marked():
        prefill, decode = profile(model_directory(options.model, Path(scratch)), Path(scratch) / "traces")
        (first, count), (second, others) = shares(prefill), shares(decode)
    rows = PROMPTS * SAMPLES
    found = {
        f"prefill\n{PROMPTS * PROMPT_TOKENS} tokens": first,
        f"decode\n{rows} samples": second,
    }
    print(f"{count} prefill steps of {PROMPTS} x {PROMPT_TOKENS} tokens, {others} decode steps of {rows}")
    totals = [sum(seconds.values()) for seconds in found.values()]
    print(
        table(
            ["kind of work", "prefill %", "decode %"],
            [
                [kind, *(f"{100 * s[kind] / t:.1f}" for s, t in zip(found.values(), totals, strict=True))]
                for kind in KINDS
            ],
        )
    )
    if options.picture:
        name = {"smollm2": "SmolLM2-135M-Instruct, float32", "tiny": "a tiny Llama"}[options.model]
        draw(found, options.picture, f"{name}; {machine}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
