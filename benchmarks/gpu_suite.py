"""Everything that needs a GPU, in one run of at most eight minutes on one H200: is it right, and how fast?

    PYTHONPATH=.:kernels python benchmarks/gpu_suite.py --out FOLDER [--only steps,ops] [--resume] [--dry-run]

Sections, each with its share of the time: bandwidth, correct, graphs, steps, ops, train, engine
(`benchmarks/gpu_suite/`, a file each). As a section ends, FOLDER/results.json gets what it found, or what it
found before it failed, and the next goes on: in a new process, where the device was lost. `--resume` leaves
out what is done there. The exit status is 1 where one failed or the time was up before it began.

`--dry-run` runs all of it on the CPU in toy shapes, in under a minute, to see that the script itself works:
figures that only CUDA can give come from the CPU's path of the same code, and the result says so.
"""

import sys

from gpu_suite.runner import main

if __name__ == "__main__":
    sys.exit(main(__doc__))
