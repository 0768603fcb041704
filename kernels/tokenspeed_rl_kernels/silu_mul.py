"""The gate of SwiGLU (Shazeer 2020): silu(x[:, :I]) * x[:, I:], rounded where transformers rounds."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed_rl_kernels.checks import misfit, shapes
from tokenspeed_rl_kernels.registry import op, runs_triton


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A shape to test."""

    name: str
    rows: int
    intermediate: int


CASES = (
    Case(name="one row", rows=1, intermediate=1536),
    Case(name="no rows", rows=0, intermediate=64),
    Case(name="odd", rows=7, intermediate=97),
    Case(name="many rows", rows=64, intermediate=1536),
)


def _fake(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)


@op(_fake)
def silu_mul(x: Tensor) -> Tensor:
    """Gate the second half of each row by the first: [T, 2I] -> [T, I]; silu is rounded to x's dtype first.

    Raises:
        ValueError: x isn't [T, 2I].
    """
    if x.ndim != 2 or x.shape[1] % 2:
        raise misfit("x misshapen", shapes(x=x), "pass x [T, 2I]: the gates, then the values")
    if runs_triton(x):
        from tokenspeed_rl_kernels.gpu import silu_mul as gpu

        return gpu.launch(x)
    gate, value = x.chunk(2, 1)
    return F.silu(gate).mul_(value).contiguous()


def reference(x: Tensor) -> Tensor:
    """`silu_mul`, from the definition silu(g) = g / (1 + exp(-g)) in float32."""
    gate, value = x.chunk(2, 1)
    wide = gate.to(torch.promote_types(x.dtype, torch.float32))
    return (wide / (1 + torch.exp(-wide))).to(x.dtype) * value
