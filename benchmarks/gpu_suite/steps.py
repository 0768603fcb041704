"""A decode step of the engine, with graphs and without, beside what paper predicts."""

from functools import partial
from typing import Any

from roofline import Shape, context_tokens, predict

from gpu_suite.machine import Machine
from gpu_suite.models import config, engine, prompts, shapes
from tokenspeed_rl import Engine

SHORT, LONG = 16, 80
"""Tokens of two runs, whose difference is steps of decoding and nothing else."""
CASES = ((1, 1), (64, 1), (256, 1), (256, 8))
"""Rows, and how many of them are samples of one prompt."""


def run(machine: Machine, found: dict[str, Any]) -> None:
    """Those with graphs first; what the time doesn't allow is left out, and said."""
    found |= {"steps": [], "left_out": [], "headlines": []}
    if not machine.cuda:
        found["headlines"] = ["on a CPU there are no graphs, and the paper is of another machine"]
    cases, context = (((1, 1), (4, 2)), 32) if machine.dry else (CASES, 2048)
    for graphs in (True, False):
        for name, shape in shapes(machine).items():
            if machine.left < 10:
                found["left_out"].append({"model": name, "graphs": graphs})
                continue
            tokens = max(rows for rows, _ in cases) * (context + LONG + 32)
            model = config(shape)
            settings = {"max_total_tokens": tokens, "max_model_len": context + LONG + 16}
            with engine(machine, model, graphs=graphs, **settings) as made:
                for rows, samples in cases:
                    case = {"model": name, "graphs": graphs, "rows": rows, "samples": samples}
                    if machine.left < 5:
                        found["left_out"].append(case)
                        continue
                    seconds = step_seconds(machine, made, shape, rows, samples, context)
                    line = case | beside_paper(machine, shape, case, context, seconds)
                    found["steps"].append(line)
                    found["headlines"].append(headline(line))


def step_seconds(
    machine: Machine, made: Engine, shape: Shape, rows: int, samples: int, context: int
) -> float:
    """Of one step at this context, which the prefix cache has but for the last tokens."""
    ids = prompts(rows // samples, context, shape.vocab)

    def roll(tokens: int) -> None:
        params = {"n": samples, "max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
        made.generate(input_ids=ids, sampling_params=params, return_logprob=True)

    roll(1)  # fills the cache
    roll(SHORT)  # captures the graph of so many rows
    short, long = (min(machine.seconds(partial(roll, tokens)) for _ in range(2)) for tokens in (SHORT, LONG))
    return (long - short) / (LONG - SHORT)


def beside_paper(
    machine: Machine, shape: Shape, case: dict[str, Any], context: int, seconds: float
) -> dict[str, Any]:
    """Measured and predicted, by the bandwidth and launch cost of this machine."""
    read = context_tokens(case["rows"], context + (SHORT + LONG) // 2, context, case["samples"])
    paper = predict(shape, case["rows"], read, bandwidth=machine.bandwidth, launch=machine.launch)
    return {
        "context": context,
        "seconds": seconds,
        "predicted": paper.seconds,
        "floor": paper.floor,
        "of_floor": paper.floor / seconds,
    }


def headline(line: dict[str, Any]) -> str:
    """One line of the final table."""
    graphs = "graphs" if line["graphs"] else "no graphs"
    ms = ", ".join(f"{name} {line[name] * 1e3:.2f} ms" for name in ("seconds", "predicted", "floor"))
    return (
        f"{line['model']}, {line['rows']} rows of {line['rows'] // line['samples']} prompts, {graphs}: "
        f"{ms}, {line['of_floor']:.0%} of the floor"
    )
