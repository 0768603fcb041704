"""Is every op right in bfloat16? Against float64 of the same inputs, and against itself, bit for bit.

Nothing but a GPU can tell: Triton's interpreter computes bfloat16 wrongly.
"""

from typing import Any

from gpu_suite.checks import attention, rows, sampling
from gpu_suite.checks.verdicts import Checks
from gpu_suite.machine import Machine

PARTS = (attention.check, rows.check, sampling.check)


def run(machine: Machine, found: dict[str, Any]) -> None:
    """All checks, whatever comes of each; then a failure that names those that failed."""
    checks = Checks(promised=machine.cuda)
    found["checks"] = checks.lines
    for part in PARTS:
        if machine.left < 0:
            raise TimeoutError(f"the time was up before {part.__module__}")
        part(machine, checks)
    found["headlines"] = [f"{len(checks.lines) - len(checks.failed)} of {len(checks.lines)} checks"]
    if checks.failed:
        raise AssertionError(f"failed: {', '.join(checks.failed)}")
