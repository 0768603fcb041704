"""Residual addition and RMS normalisation (Zhang and Sennrich 2019), rounded where transformers rounds.

    s = x + residual;   y = weight * (s * rsqrt(mean(s ** 2) + eps))

Mode ``hf``: s is rounded to the dtype of x, the norm is float32, rounded once more before the weight.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed_rl_kernels.checks import misfit, shapes
from tokenspeed_rl_kernels.registry import op, runs_triton


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A shape to test."""

    name: str
    rows: int
    hidden: int
    residual: bool = True


CASES = (
    Case(name="one row", rows=1, hidden=576),
    Case(name="no rows", rows=0, hidden=64),
    Case(name="no residual", rows=5, hidden=64, residual=False),
    Case(name="odd", rows=7, hidden=97),
    Case(name="many rows", rows=300, hidden=576),
)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, mode: str = "hf"
) -> tuple[Tensor, Tensor]:
    """Add, then normalise over the last dimension.

    Args:
        x: [T, H].
        residual: [T, H] of x's dtype, or None: nothing is added.
        weight: [H].
        eps: added to the mean square.
        mode: where it rounds; ``hf`` is the only one.

    Returns:
        (y [T, H], new residual [T, H]), of x's dtype, y of the weight's if that is wider. Without a residual
        the second is x itself.

    Raises:
        ValueError: shapes or dtypes misfit, or an unknown mode.
    """
    if mode != "hf":
        raise misfit("unknown rounding mode", mode, "pass mode='hf'")
    if x.ndim != 2 or weight.shape != x.shape[1:] or (residual is not None and residual.shape != x.shape):
        got = shapes(x=x, weight=weight, **({} if residual is None else {"residual": residual}))
        raise misfit("shapes misfit", got, "pass x [T, H], residual [T, H] or None, weight [H]")
    if residual is None:
        return _rms_norm(x, weight, eps), x
    if residual.dtype != x.dtype:
        raise misfit("dtypes of x and residual differ", (x.dtype, residual.dtype), "use one dtype")
    return _add_rms_norm(x, residual, weight, eps)


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))


def _add_rms_norm_fake(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _rms_norm_fake(x, weight, eps), x.new_empty(x.shape)


# Two ops, for none may return an argument of its own.
@op(_rms_norm_fake)
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if runs_triton(x):
        from tokenspeed_rl_kernels.gpu import add_rms_norm as gpu

        return gpu.launch(x, None, weight, eps)[0]
    return _norm(x, weight, eps).contiguous()


@op(_add_rms_norm_fake)
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if runs_triton(x):
        from tokenspeed_rl_kernels.gpu import add_rms_norm as gpu

        return gpu.launch(x, residual, weight, eps)
    total = (x + residual).contiguous()
    return _norm(total, weight, eps), total


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scaled = wide * (wide * wide).mean(1, keepdim=True).add_(eps).rsqrt_()
    return scaled.to(x.dtype).mul_(weight) if weight.dtype == x.dtype else weight * scaled.to(x.dtype)


def reference(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm`, written as transformers writes it."""
    total = x if residual is None else x + residual
    wide = total.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + eps)).to(total.dtype), total
