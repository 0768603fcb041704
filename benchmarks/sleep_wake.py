"""What does it cost to take the engine's memory and to give it back? SmolLM2-135M in float32, on the CPU.

    python benchmarks/sleep_wake.py [--cycles 50] [--threads 2] [--kv-tokens 8192] [--model smollm2|tiny]

The peer is what one does with an engine that can't sleep: end it, and build another from disk. In every cycle
the KV cache is written from end to end, as by prompts that take all of it, then released and taken back: with
the weights, saved in host memory or not (then an update follows the wake), or alone. The first token after
that is timed, and compared with that of the same engine just before its release.

What was returned is measured twice around the release: anonymous memory of the process (Pss_Anon of
smaps_rollup; what it saved not counted), and what the system calls available (MemAvailable, which other
processes move and some virtual machines don't; what was saved counts). The residue is what the process holds
while all of the engine sleeps, less what it held without one. Flat: the last cycle's less the first one's.
"""

import ctypes
import gc
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import arguments, describe, model_directory, table
from torch import Tensor
from transformers import AutoModelForCausalLM

from tokenspeed_rl import Engine

MB = 1e6
PROMPT = list(range(3, 19))


def kib(path: str, key: str) -> int:
    """Bytes of a line in KiB of one of the kernel's files."""
    text = Path(path).read_text()
    return int(text[text.index(f"{key}:") :].split()[1]) * 1024


def held() -> int:
    """Bytes of anonymous memory of this process."""
    return kib("/proc/self/smaps_rollup", "Pss_Anon")


def available() -> int:
    """Bytes that the system could give to anybody."""
    return kib("/proc/meminfo", "MemAvailable")


def timed(act: Callable[[], Any]) -> float:
    """Seconds that `act` takes."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


class Way:
    """One way to sleep and wake, and what was measured of it in an engine of its own."""

    def __init__(self, name: str, tags: list[str] | None, backup: str) -> None:
        """`tags` as for `release_memory_occupation`; `backup` as `weights_backup`."""
        self.name, self.tags, self.backup = name, tags, backup
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.held: list[tuple[int, int]] = []
        """Bytes of the process before and after each release, backups not counted."""
        self.available: list[tuple[int, int]] = []
        """The same of the system, backups counted."""
        self.bare = 0
        """Bytes that the process held without an engine."""

    def run(self, directory: Path, named: dict[str, Tensor], kv_tokens: int, cycles: int) -> None:
        """Build an engine, and let it sleep `cycles` times."""
        settle()
        self.bare = held()
        options = {"weights_backup": self.backup, "max_total_tokens": kv_tokens}
        with Engine(str(directory), **options) as engine:
            first_token(engine)
            for _ in range(cycles):
                self.cycle(engine, named)

    def cycle(self, engine: Engine, named: dict[str, Tensor]) -> None:
        """Release and take back, once."""
        seconds = self.seconds
        fill(engine)
        seconds["awake"].append(first_token(engine))
        settle()
        before = held(), available()
        seconds["release"].append(timed(lambda: engine.release_memory_occupation(self.tags)))
        after = held(), available()
        self.held.append((before[0], after[0] - engine.memory_report()["weights"]["host"]))
        self.available.append((before[1], after[1]))
        seconds["wake"].append(timed(lambda: engine.resume_memory_occupation(self.tags)))
        if not engine.get_internal_state()[0]["validity"].startswith("valid"):
            seconds["update"].append(timed(lambda: engine.update_weights_from_tensor(named)))
        seconds["first"].append(first_token(engine))

    def row(self, rebuild: float) -> list[str]:
        """A line of the table; `rebuild`: seconds of a new engine."""
        ms = {key: median(values) * 1e3 for key, values in self.seconds.items()}
        whole = ms["release"] + ms["wake"] + ms.get("update", 0.0)
        back = median(before - after for before, after in self.held)
        freed = median(after - before for before, after in self.available)
        residue = median(after for _, after in self.held) - self.bare
        return [
            self.name,
            f"{ms['release']:.1f}",
            f"{ms['wake']:.1f}",
            f"{ms['update']:.0f}" if "update" in ms else "-",
            f"{rebuild * 1e3 / whole:.1f}x",
            f"{back / MB:,.0f}",
            f"{freed / MB:,.0f}",
            f"{residue / MB:,.1f}" if self.tags is None else "-",
            f"{(self.held[-1][1] - self.held[0][1]) / MB:+.1f}",
            f"{ms['first']:.0f}",
            f"{ms['first'] / ms['awake']:.2f}x",
        ]


def settle() -> None:
    """Give back what the process itself has no use for, so that it counts for no engine."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def first_token(engine: Engine) -> float:
    """Seconds from the call to the first token of a prompt of which nothing is cached."""
    engine.flush_cache()
    params = {"max_new_tokens": 1, "temperature": 0}
    return timed(lambda: engine.generate(input_ids=PROMPT, sampling_params=params))


def fill(engine: Engine) -> None:
    """Write every page, as prompts would that take the whole cache."""
    kv = engine.client._core.kv
    for layer in (*kv.k, *kv.v):
        layer.fill_(0.0)


def rebuild(directory: Path, kv_tokens: int) -> float:
    """Seconds to build an engine with its cache from disk, to where it could generate, and to end it."""

    def build() -> None:
        with Engine(str(directory), max_total_tokens=kv_tokens) as engine:
            engine.client._core.capacity()  # maps the cache

    return timed(build)


HEAD = [
    "release and resume", "release ms", "wake ms", "update ms", "a new engine is", "returned MB",
    "available MB", "residue MB", "flat MB", "first token ms", "of awake",
]  # fmt: skip


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--kv-tokens", type=int, default=8192)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        directory = model_directory(args.model, Path(scratch))
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        named = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        del model
        rebuild(directory, args.kv_tokens)  # warm up
        ways = [
            Way("all, weights not saved", None, "none"),
            Way("all, weights saved", None, "cpu"),
            Way("kv_cache alone", ["kv_cache"], "none"),
        ]
        rebuilt = []
        for way in ways:
            rebuilt += [rebuild(directory, args.kv_tokens) for _ in range(2)]
            way.run(directory, named, args.kv_tokens, args.cycles)
    print(describe(args.threads))
    weights = sum(tensor.nbytes for tensor in named.values())
    print(
        f"weights {weights / MB:,.0f} MB, cache of {args.kv_tokens:,} tokens, median of {args.cycles} cycles"
    )
    print(f"building an engine from disk and ending it: {median(rebuilt) * 1e3:,.0f} ms")
    print(table(HEAD, [way.row(median(rebuilt)) for way in ways]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
