"""Control calls at random from four threads while four others generate; every output is recomputed.

    python -m tests.soak [--minutes 10] [--seed 0] [--family llama]

Each thread's calls follow from the seed, how the threads interleave doesn't. One line every ten seconds, then
a summary. Exits with 1 on any fault, having printed it and the calls before it: an output that isn't what its
version spans say, an exception that no promise allows, a call that hangs, memory that grows, pages that don't
come back, weights that aren't those of the last update.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys

import torch

from tests.soak.run import soak, totals
from tests.tiny import CONFIGS

SHOWN = 60
"""Calls that are shown after a fault."""


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=sorted(CONFIGS), default="llama")
    args = parser.parse_args()
    torch.set_num_threads(1)
    faulthandler.enable()

    def say(line: str) -> None:
        print(line, flush=True)

    journal = soak(args.minutes * 60.0, args.seed, args.family, say)
    for call, number in sorted(journal.counts.items()):
        say(f"{number:9,}  {call}")
    say(totals(journal))
    if journal.faults:
        say("\nThe last calls:")
        for line in journal.last(SHOWN):
            say(line)
        say(f"\n{len(journal.faults)} faults, seed {args.seed}:")
        for fault in journal.faults:
            say(fault)
    return int(bool(journal.faults))


if __name__ == "__main__":
    sys.exit(main())
