"""The gate of the feed-forward, in Triton."""

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.interpreter.memory import sparse
from tokenspeed_rl_kernels.gpu.silu_mul import BLOCK, BUILD, silu_mul_kernel
from tokenspeed_rl_kernels.silu_mul import CASES, silu_mul


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_transformers(case, dtype):
    """Silu is rounded, then the product: one unit in the last place of each at most."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(case.rows, 2 * case.intermediate, generator=generator).mul_(5).to(dtype)
    gate, value = x.chunk(2, 1)
    torch.testing.assert_close(silu_mul(x), F.silu(gate) * value, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_extreme_gates():
    """Gates far out give 0 or the gate itself, never NaN."""
    assert silu_mul(torch.tensor([[-1e4, 1e4, 1.0, 1.0]])).tolist() == [[0.0, 1e4]]


def test_more_elements_than_int32_counts(programs_from):
    """The last row of more than 2^31 elements is gated like any other."""
    width = 2**16
    rows = 2**31 // (2 * width) + 2
    x, out = (sparse(rows, columns, dtype=torch.float16) for columns in (2 * width, width))
    generator = torch.Generator().manual_seed(0)
    x[-1, :BLOCK], x[-1, width : width + BLOCK] = torch.randn(2, BLOCK, generator=generator).half()
    programs_from(rows - 1)
    BUILD.run(silu_mul_kernel, (1, 1), x, out, width)
    programs_from(0)
    gate, value = x[-1:, :BLOCK], x[-1:, width : width + BLOCK]
    assert torch.equal(out[-1:, :BLOCK], silu_mul(torch.cat((gate, value), 1)))
