"""The linear layer, in Triton."""

import pytest
import torch
import torch.nn.functional as F

from tokenspeed_rl_kernels.gpu import linear as gpu
from tokenspeed_rl_kernels.linear import linear

SHAPES = [(1, 1, 1), (1, 97, 61), (1, 300, 40), (3, 64, 96), (16, 257, 33), (17, 97, 61), (40, 130, 20)]
"""Rows, inputs, outputs."""


def inputs(rows, width, columns, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows)
    shapes = (rows, width), (columns, width), (columns,)
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_exact_as_torch(shape, dtype, invariant, check_exact):
    """Masks hold where nothing is a multiple of a block; the bias is added before the one rounding."""
    x, weight, bias = inputs(*shape, dtype)
    exact = x.double() @ weight.double().t()
    check_exact(linear(x, weight, invariant=invariant), F.linear(x, weight), exact)
    check_exact(
        linear(x, weight, bias, invariant=invariant), F.linear(x, weight, bias), exact + bias.double()
    )


@pytest.mark.parametrize("columns", [5000, 20000])
def test_builds_for_many_outputs(columns, dtype, check_exact, monkeypatch):
    """Wider tiles, and a GEMV of several outputs at a time: tried on fewer outputs than they are for."""
    for name in ("tile_build", "gemv_build"):
        build = getattr(gpu, name)
        monkeypatch.setattr(gpu, name, lambda _, *rest, build=build: build(columns, *rest))
    x, weight, bias = inputs(2, 150, 131, dtype)
    exact = x.double() @ weight.double().t() + bias.double()
    for rows in (1, 2):
        check_exact(linear(x[:rows], weight, bias), F.linear(x[:rows], weight, bias), exact[:rows])


def test_what_runs(monkeypatch):
    """One row: the GEMV; up to 16: a tile; more: torch's product. In invariant mode: tiles always."""
    ran, run = [], gpu.Build.run

    def spy(build, kernel, *args):
        ran.append(kernel)
        run(build, kernel, *args)

    monkeypatch.setattr(gpu.Build, "run", spy)
    x, weight, _ = inputs(17, 32, 24)
    for rows in (1, 2, 16, 17):
        linear(x[:rows], weight)
    assert ran == [gpu.gemv_kernel, gpu.tile_kernel, gpu.tile_kernel]
    for rows in (1, 17):
        linear(x[:rows], weight, invariant=True)
    assert ran[3:] == [gpu.tile_kernel, gpu.tile_kernel]


def test_no_rows():
    """An empty grid isn't launched."""
    _, weight, bias = inputs(1, 32, 24)
    for invariant in (False, True):
        assert linear(weight[:0], weight, bias, invariant=invariant).shape == (0, 24)


def test_invariant_rows_are_bitwise_equal(dtype):
    """A row has the same bits for every number of rows from 1 to 40 and every place among them."""
    x, weight, bias = inputs(40, 300, 20, dtype)
    whole = linear(x, weight, bias, invariant=True)
    for rows in range(1, 40):
        assert torch.equal(linear(x[:rows], weight, bias, invariant=True), whole[:rows])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(linear(x[order], weight, bias, invariant=True), whole[order])


@pytest.mark.parametrize("rows", [1, 5])
def test_parts_of_larger_tensors(rows):
    """Rows may lie apart, and nothing is read beside them: there is NaN."""
    x, weight, bias = inputs(rows, 37, 21)
    apart = [F.pad(t, (0, 5, 0, 3), value=torch.nan)[: len(t), :37] for t in (x, weight)]
    assert torch.equal(linear(*apart, bias), linear(x, weight, bias))
    assert torch.equal(linear(x.t().contiguous().t(), weight.t().contiguous().t()), linear(x, weight))


@pytest.mark.parametrize("rows", [1, 3])
def test_offsets_past_2_31(rows):
    """Rows of the weight, and of x, that begin past 2^31 elements; hardly any of the memory is touched."""
    memory = torch.empty(2**31 + 2**10, dtype=torch.float16)
    far = memory.as_strided((3, 16), (2**30 + 8, 1))
    far.copy_(torch.arange(48).view(3, 16) % 7)
    near = far.contiguous()
    assert torch.equal(linear(far[-rows:], far), linear(near[-rows:], near))


def test_other_dtypes_are_refused():
    """What tiles would sum in float32 all the same."""
    x, weight, _ = inputs(2, 8, 4, torch.float64)
    with pytest.raises(ValueError, match="dtype has no kernel"):
        linear(x, weight)
