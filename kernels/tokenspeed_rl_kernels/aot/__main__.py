"""Compile every kernel and print what came of it; end with 1 where one breaks a limit of `limits`.

python -m tokenspeed_rl_kernels.aot [--arch sm_90] [--kernel NAME] [--json FILE]
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import triton

from tokenspeed_rl_kernels.aot.compilation import TARGETS, compile_spec
from tokenspeed_rl_kernels.aot.figures import Figures, figures_of
from tokenspeed_rl_kernels.aot.limits import faults
from tokenspeed_rl_kernels.aot.specs import all_specs


def main() -> int:
    """Compile, print, write; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tokenspeed_rl_kernels.aot",
        description="Compile every kernel and print what came of it.",
    )
    parser.add_argument("--arch", action="append", choices=TARGETS, help="one or more; all without it")
    parser.add_argument("--kernel", default="", help="only specs that have this in their name")
    parser.add_argument(
        "--json", type=Path, help="write NVIDIA's figures to this file, as the golden file has them"
    )
    arguments = parser.parse_args()
    try:
        specs = {name: spec for name, spec in all_specs().items() if arguments.kernel in name}
    except RuntimeError as error:
        parser.error(str(error))
    if not specs:
        parser.error(f"no spec has {arguments.kernel!r} in its name")
    figures: dict[str, dict[str, dict[str, object]]] = {}
    broken = 0
    for arch in arguments.arch or TARGETS:
        print(f"\n{_row(arch, 'regs', 'stack', 'spills', 'shared', 'async', 'instr', 'matrix')}")
        for name, spec in specs.items():
            found = figures_of(compile_spec(spec, arch))
            figures.setdefault(arch, {})[name] = asdict(found)
            print(_figures_row(name, found), flush=True)
            for fault in faults(spec, arch, found):
                broken += 1
                print(f"  ^ {fault}")
    if arguments.json:
        nvidia = {arch: found for arch, found in figures.items() if arch.startswith("sm_")}
        arguments.json.write_text(_golden(nvidia))
    return 1 if broken else 0


def _golden(figures: dict[str, dict[str, dict[str, object]]]) -> str:
    """As JSON, one kernel a line: a difference shows by itself."""
    archs = [
        f'"{arch}": {{\n'
        + ",\n".join(f"  {json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found))
        + "\n }"
        for arch, found in figures.items()
    ]
    return f'{{"triton": "{triton.__version__}", "figures": {{\n ' + ",\n ".join(archs) + "\n}}\n"


def _figures_row(name: str, figures: Figures) -> str:
    copies = " ".join(f"{count}x{size}B" for size, count in figures.async_copies.items()) or "-"
    matrix = " ".join(f"{count} {kind}" for kind, count in figures.matrix.items()) or "-"
    numbers = figures.registers, figures.stack, figures.spills, figures.shared, copies, figures.instructions
    return _row(name, *numbers, matrix)


def _row(name: str, *cells: object) -> str:
    *numbers, last = cells
    widths = 6, 7, 8, 8, 14, 7
    return (
        f"{name:44}"
        + "".join(f"{n!s:>{width}}" for n, width in zip(numbers, widths, strict=True))
        + f"  {last}"
    )


if __name__ == "__main__":
    sys.exit(main())
