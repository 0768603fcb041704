"""Residual addition and RMS norm with the rounding points of transformers."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tokenspeed_rl_kernels.add_rms_norm import CASES, add_rms_norm, reference


def inputs(case, dtype):
    generator = torch.Generator().manual_seed(case.rows)
    x, residual = (torch.randn(case.rows, case.hidden, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(case.hidden, generator=generator).to(dtype)
    return x, residual if case.residual else None, weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_transformers_bit_for_bit(case, dtype):
    """The engine's norm is the trainer's: same bits in every dtype, for any number of rows."""
    x, residual, weight = inputs(case, dtype)
    norm = LlamaRMSNorm(case.hidden, eps=1e-5).to(dtype)
    norm.weight.data.copy_(weight)
    total = x if residual is None else x + residual
    before = x.clone()
    with torch.no_grad():
        for op in (add_rms_norm, reference):
            y, added = op(x, residual, weight, 1e-5)
            assert torch.equal(y, norm(total)) and y.dtype == dtype
            assert torch.equal(added, total)
    assert torch.equal(x, before)


def test_close_to_float64():
    """The float32 norm is right, not merely the same as another one."""
    x, residual, weight = inputs(CASES[-1], torch.float32)
    total = (x + residual).double()
    exact = weight.double() * total / (total.square().mean(1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(
        add_rms_norm(x, residual, weight, 1e-6)[0].double(), exact, rtol=1e-6, atol=1e-6
    )


def test_weight_of_a_wider_dtype():
    """A float32 weight on bfloat16 rows widens the result, as it does in transformers."""
    x = torch.randn(3, 8).bfloat16()
    y, _ = add_rms_norm(x, None, torch.ones(8), 1e-6)
    assert y.dtype == torch.float32


def test_results_are_contiguous():
    """Whatever the strides of the arguments."""
    x = torch.randn(8, 3).t()
    results = *add_rms_norm(x, x, torch.ones(8), 1e-6), add_rms_norm(x, None, torch.ones(8), 1e-6)[0]
    assert all(result.is_contiguous() for result in results)


def test_rows_don_t_depend_on_each_other():
    """F12: a row's norm has the same bits alone and among others."""
    x, residual, weight = inputs(CASES[-1], torch.float32)
    together = add_rms_norm(x, residual, weight, 1e-6)[0]
    alone = torch.cat([add_rms_norm(x[i, None], residual[i, None], weight, 1e-6)[0] for i in range(len(x))])
    assert torch.equal(together, alone)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((torch.zeros(2, 4), None, torch.zeros(5), 1e-6), "shapes misfit"),
        ((torch.zeros(2, 4), torch.zeros(1, 4), torch.zeros(4), 1e-6), "shapes misfit"),
        ((torch.zeros(4), None, torch.zeros(4), 1e-6), "shapes misfit"),
    ],
)
def test_misfits_are_refused(arguments, word):
    """A misfit raises ValueError; so does a rounding mode that isn't there."""
    with pytest.raises(ValueError, match=word):
        add_rms_norm(*arguments)
    with pytest.raises(ValueError, match="unknown rounding mode: got fast"):
        add_rms_norm(torch.zeros(2, 4), None, torch.zeros(4), 1e-6, mode="fast")
