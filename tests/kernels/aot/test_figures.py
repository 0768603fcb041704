"""Every kernel in every listed configuration, compiled for GPUs that aren't here: what it takes and has.

The golden file is renewed by ``python -m tokenspeed_rl_kernels.aot --json tests/kernels/aot/golden.json``.
"""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import triton

from tokenspeed_rl_kernels.aot.compilation import TARGETS, compile_spec
from tokenspeed_rl_kernels.aot.figures import figures_of
from tokenspeed_rl_kernels.aot.limits import faults
from tokenspeed_rl_kernels.aot.specs import all_specs

SPECS = all_specs()
GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())


FIRST = {id(spec.kernel): name for name, spec in reversed(SPECS.items())}.values()
"""A spec of each kernel."""
COMPILATIONS = [
    pytest.param(name, arch, marks=[pytest.mark.long] if arch == "gfx942" and name not in FIRST else [])
    for name in SPECS
    for arch in TARGETS
]


@pytest.mark.parametrize(("name", "arch"), COMPILATIONS)
def test_within_limits_and_as_before(name, arch):
    """No spills, few registers, the copies and matrix instructions wanted; a figure that changes is seen."""
    figures = figures_of(compile_spec(SPECS[name], arch))
    assert not faults(SPECS[name], arch, figures)
    # What AMD's compiler makes of a kernel also hangs on what it compiled before.
    if arch in GOLDEN["figures"] and triton.__version__ == GOLDEN["triton"]:
        assert asdict(figures) == GOLDEN["figures"][arch].get(name), "is it better? then renew golden.json"


def test_golden_file_has_no_other_kernels():
    """A figure whose kernel is gone goes too."""
    assert GOLDEN["figures"].keys() == {"sm_80", "sm_90"}
    for figures in GOLDEN["figures"].values():
        assert figures.keys() == SPECS.keys()
