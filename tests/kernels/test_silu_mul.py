"""The gate of the feed-forward."""

import pytest
import torch
import torch.nn.functional as F

from tokenspeed_rl_kernels.silu_mul import CASES, reference, silu_mul


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_transformers_bit_for_bit(case, dtype):
    """The gate rounds where the trainer's does: silu first, then the product."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(case.rows, 2 * case.intermediate, generator=generator).mul_(5).to(dtype)
    before = x.clone()
    gate, value = x.chunk(2, 1)
    assert torch.equal(silu_mul(x), F.silu(gate) * value)
    assert torch.equal(x, before)
    torch.testing.assert_close(silu_mul(x), reference(x), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_extreme_gates():
    """Gates far out give 0 or the gate itself, never NaN."""
    assert silu_mul(torch.tensor([[-1e4, 1e4, 1.0, 1.0]])).tolist() == [[0.0, 1e4]]


def test_results_are_contiguous():
    """Whatever the strides of x: what torch.compile is told about the result is so."""
    assert silu_mul(torch.randn(8, 3).t()).is_contiguous()


def test_misfit_is_refused():
    """An odd width is no pair of gate and value."""
    with pytest.raises(ValueError, match="x misshapen"):
        silu_mul(torch.zeros(2, 3))
