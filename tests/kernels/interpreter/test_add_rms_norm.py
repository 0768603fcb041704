"""Residual addition and RMS norm, in Triton."""

import pytest
import torch

from tests.kernels.interpreter.memory import sparse, survive
from tests.kernels.test_add_rms_norm import inputs
from tokenspeed_rl_kernels.add_rms_norm import CASES, add_rms_norm, reference
from tokenspeed_rl_kernels.gpu import add_rms_norm as gpu


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_transformers(case, dtype):
    """The sum bit for bit; the norm, summed in another order, but for a last bit before the weight."""
    x, residual, weight = inputs(case, dtype)
    y, total = add_rms_norm(x, residual, weight, 1e-5)
    expected, added = reference(x, residual, weight, 1e-5)
    assert torch.equal(total, added) and y.dtype == dtype
    torch.testing.assert_close(y, expected, rtol=3 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_as_exact_as_torch(case, dtype, check_exact):
    """The error against float64 is that of torch."""
    x, residual, weight = inputs(case, dtype)
    total = reference(x, residual, weight, 1e-5)[1].double()
    exact = weight.double() * total / (total.square().mean(1, keepdim=True) + 1e-5).sqrt()
    arguments = x, residual, weight, 1e-5
    check_exact(add_rms_norm(*arguments)[0], reference(*arguments)[0], exact)


def test_rows_dont_depend_on_each_other(dtype):
    """Norm block depending on rows: a row has the same bits alone, among 300, and in another place."""
    x, residual, weight = inputs(CASES[-1], dtype)
    together = add_rms_norm(x, residual, weight, 1e-6)[0]
    assert torch.equal(add_rms_norm(x.flip(0), residual.flip(0), weight, 1e-6)[0], together.flip(0))
    for row in (0, 7, 299):
        assert torch.equal(add_rms_norm(x[row, None], residual[row, None], weight, 1e-6)[0][0], together[row])


@pytest.mark.parametrize(
    ("rows", "weights"), [(torch.float16, torch.float32), (torch.float32, torch.float16)], ids=str
)
def test_weight_of_another_dtype(rows, weights):
    """The result has the wider dtype, as in torch; the norm is rounded to the rows' before the weight."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator) for shape in ((5, 40), (40,)))
    x, weight = x.to(rows), weight.to(weights)
    y, expected = add_rms_norm(x, None, weight, 1e-6)[0], reference(x, None, weight, 1e-6)[0]
    assert y.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(y, expected, rtol=4 * torch.finfo(rows).eps, atol=0)


def test_without_a_residual_the_sum_is_x_itself(dtype):
    """Nothing is copied and nothing written."""
    x, weight = torch.randn(2, 8).to(dtype), torch.randn(8).to(dtype)
    before = x.clone()
    assert add_rms_norm(x, None, weight, 1e-6)[1] is x and torch.equal(x, before)


def test_rows_apart_in_memory(dtype):
    """Rows and residual may be views: every second row, columns of a wider tensor."""
    x, residual, weight = inputs(CASES[-2], dtype)
    wide = torch.full((14, 200), torch.nan, dtype=dtype)
    wide[::2, :97], wide[::2, 97:194] = x, residual
    got = add_rms_norm(wide[::2, :97], wide[::2, 97:194], weight, 1e-5)
    for view, whole in zip(got, add_rms_norm(x, residual, weight, 1e-5), strict=True):
        assert torch.equal(view, whole)


@pytest.mark.parametrize("eps", [1e-5, 1e-12, 1e-30])
def test_extreme_values(eps, dtype):
    """1e4 in float16, whose square is no float16; zeros in a row, or all of it; an eps of all but nothing."""
    x = torch.zeros(4, 64, dtype=dtype)
    x[0], x[1, 3], x[2, ::2] = 1e4, 1e4, -1e4
    y = add_rms_norm(x, None, torch.ones(64, dtype=dtype), eps)[0]
    expected = torch.zeros(4, 64, dtype=dtype)
    expected[0], expected[1, 3], expected[2, ::2] = 1, 8, -(2**0.5)
    torch.testing.assert_close(y, expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_overflow_of_the_sum_is_torchs():
    """A sum past float16 is infinite, and its row NaN, as in transformers: not clamped, not hidden."""
    x = torch.full((1, 16), 6e4, dtype=torch.float16)
    y, total = add_rms_norm(x, x, torch.ones(16, dtype=torch.float16), 1e-5)
    expected, added = reference(x, x, torch.ones(16, dtype=torch.float16), 1e-5)
    assert torch.equal(total, added) and total.isinf().all()
    assert torch.equal(y.isnan(), expected.isnan()) and y.isnan().all()


def test_more_elements_than_int32_counts(programs_from):
    """Offsets past 2^31: the last of the rows is read and written where it lies."""
    width, rows = 4096, 2**19 + 2
    x, residual, y, total = (sparse(rows, width, dtype=torch.float16) for _ in range(4))
    x[-1], residual[-1] = torch.randn(2, width).half()
    weight = torch.ones(width, dtype=torch.float16)

    def last_row():
        programs_from(rows - 1)
        gpu.build(width, True).run(gpu.add_rms_norm_kernel, (1,), x, residual, weight, y, total, width, 1e-5)
        programs_from(0)
        expected = add_rms_norm(x[-1:], residual[-1:], weight, 1e-5)
        assert torch.equal(total[-1], x[-1] + residual[-1])
        assert torch.equal(y[-1], expected[0][0])

    survive(last_row)
