"""Kernels as torch ops: what they promise to torch, and what their fakes say, is what they do."""

import pytest
import torch

from tests.kernels.test_rope_write_kv import CASES, inputs
from tokenspeed_rl_kernels import linear


def rope_arguments(case):
    *tensors, options = inputs(case, torch.bfloat16)
    return tuple(tensors), options


CALLS = {
    "silu_mul": ((torch.randn(3, 8),), {}),
    "rms_norm": ((torch.randn(3, 8), torch.randn(8), 1e-5), {}),
    "rms_norm wide": ((torch.randn(3, 8).half(), torch.randn(8), 1e-5), {}),
    "add_rms_norm": ((torch.randn(3, 8), torch.randn(3, 8), torch.randn(8), 1e-5), {}),
    "rope_write_kv": rope_arguments(CASES[5]),
    "rope_write_kv normed": rope_arguments(CASES[3]),
}


@pytest.mark.parametrize("name", CALLS)
def test_ops_keep_their_promises(name):
    """The schema names all that is written, no result is an argument, and fakes tell shapes and dtypes."""
    args, kwargs = CALLS[name]
    op = getattr(torch.ops.tokenspeed_rl, name.split()[0]).default
    torch.library.opcheck(op, args, kwargs, test_utils=("test_schema", "test_faketensor"))


def test_autocast_changes_nothing():
    """A trainer's autocast neither rounds a product nor changes the dtype of a result."""
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    expected = linear(x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear(x, weight)
        assert torch.mm(x, x.t()).dtype == torch.bfloat16, "autocast is on again"
    assert found.dtype == torch.float32 and torch.equal(found, expected)
