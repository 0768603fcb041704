"""y = x W^T + b for few rows, as decoding has them.

torch's float32 product on the CPU is at its worst with 7 to 16 rows: with the weight on the left, as W x^T,
the same takes 0.5 to 0.85 of the time on SmolLM2's shapes. At other row counts it is slower, or no better.

In invariant mode rows are taken in blocks of a fixed size, the last one padded: then a row meets the same
code whatever rows stand beside it. Measured: its bits are the same in every place of a block of 16, with AVX2
and with AVX-512, which is not true of every size; from one size to another they differ.

What runs on a GPU, `gpu/linear.py` says.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed_rl_kernels.checks import misfit, shapes
from tokenspeed_rl_kernels.registry import op, runs_triton

WEIGHT_FIRST = range(7, 17)
"""Row counts at which W x^T is the faster."""
INVARIANT_ROWS = 16
"""Rows of a block in invariant mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A shape to test."""

    name: str
    rows: int
    inputs: int
    outputs: int
    bias: bool = False


CASES = (
    Case(name="one row", rows=1, inputs=64, outputs=96),
    Case(name="no rows", rows=0, inputs=64, outputs=96),
    Case(name="bias", rows=3, inputs=64, outputs=96, bias=True),
    Case(name="weight first", rows=12, inputs=576, outputs=960, bias=True),
    Case(name="weight first, odd", rows=9, inputs=97, outputs=61),
    Case(name="many rows", rows=65, inputs=576, outputs=960, bias=True),
)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, invariant: bool = False) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@op(_fake)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, invariant: bool = False) -> Tensor:
    """x W^T + b, summed in float32 and rounded once.

    Args:
        x: [T, K].
        weight: [N, K], of x's dtype; rows may lie apart.
        bias: [N], of x's dtype.
        invariant: a row's result is, bit for bit, the same for every T and place in it.

    Returns:
        [T, N], contiguous.

    Raises:
        ValueError: shapes or dtypes misfit.
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise misfit("shapes misfit", shapes(x=x, weight=weight), "pass x [T, K] and weight [N, K]")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise misfit("shapes misfit", shapes(weight=weight, bias=bias), "pass bias [N]")
    dtypes = [t.dtype for t in (x, weight, bias) if t is not None]
    if len(set(dtypes)) > 1:
        raise misfit("dtypes differ", dtypes, "use one dtype")
    if runs_triton(x):
        from tokenspeed_rl_kernels.gpu import linear as gpu

        return gpu.launch(x, weight, bias, invariant)
    rows = len(x)
    if invariant:
        blocks = F.pad(x, (0, 0, 0, -rows % INVARIANT_ROWS)).split(INVARIANT_ROWS)
        return torch.cat([F.linear(block, weight, bias) for block in blocks])[:rows]
    if rows not in WEIGHT_FIRST or x.dtype != torch.float32:
        return F.linear(x, weight, bias)
    # Left transposed, the result would slow down all that reads it.
    y = torch.mm(weight, x.t()).t().contiguous()
    return y if bias is None else y.add_(bias)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear`, summed in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.einsum("tk,nk->tn", x.to(wide), weight.to(wide))
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)
