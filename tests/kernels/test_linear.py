"""The linear layer for few rows."""

import pytest
import torch

from tokenspeed_rl_kernels.linear import CASES, linear, reference


def inputs(rows, case):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(case.outputs, case.inputs, generator=generator)
    bias = torch.randn(case.outputs, generator=generator) if case.bias else None
    return torch.randn(rows, case.inputs, generator=generator), weight, bias


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_float64(case, invariant):
    """Every row count, on whichever side the weight stands, sums in float32 at least and lies contiguous."""
    x, weight, bias = inputs(case.rows, case)
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    y = linear(x, weight, bias, invariant=invariant)
    assert y.is_contiguous() and y.shape == (case.rows, case.outputs)
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(reference(x, weight, bias).double(), exact, rtol=1e-5, atol=1e-4)


def test_bfloat16():
    """Half precision sums in float32 and rounds once."""
    x, weight, bias = inputs(12, CASES[3])
    half = [t.bfloat16() for t in (x, weight, bias)]
    y = linear(*half)
    exact = half[0].double() @ half[1].double().t() + half[2].double()
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), exact, rtol=2**-7, atol=2**-7)


def test_rows_of_any_batch_agree():
    """F12: a row moves by float32 rounding at most with the number of rows beside it."""
    x, weight, bias = inputs(40, CASES[3])
    whole = linear(x, weight, bias)
    for rows in (*range(1, 20), 39):
        torch.testing.assert_close(linear(x[:rows], weight, bias), whole[:rows], rtol=1e-5, atol=5e-5)


def test_invariant_rows_are_bitwise_equal():
    """`invariant=True` gives a row the same bits for every number of rows and every place among them."""
    x, weight, bias = inputs(40, CASES[3])
    whole = linear(x, weight, bias, invariant=True)
    for rows in (1, 2, 3, 5, 8, 13, 31):
        assert torch.equal(linear(x[:rows], weight, bias, invariant=True), whole[:rows])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(linear(x[order], weight, bias, invariant=True), whole[order])


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.zeros(2, 3), torch.zeros(4, 5)),
        (torch.zeros(3), torch.zeros(4, 3)),
        (torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(3)),
        (torch.zeros(2, 3), torch.zeros(4, 3).double()),
        (torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(4).half()),
    ],
)
def test_misfits_are_refused(arguments):
    """A misfit raises ValueError with the shapes or dtypes it got."""
    with pytest.raises(ValueError, match=r"(shapes misfit|dtypes differ): got"):
        linear(*arguments)


def test_is_an_op():
    """Compilers and fake tensors see one op."""
    torch.library.opcheck(torch.ops.tokenspeed_rl.linear.default, inputs(3, CASES[2]))
