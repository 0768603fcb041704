"""`add_rms_norm`: a program per row, which holds the whole row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_rl_kernels.gpu.kernel import TYPES, Build, Spec, next_power_of_2


@triton.jit
def add_rms_norm_kernel(x, residual, weight, y, total, width, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    """y [T, H], and total [T, H] where it ADDS, of x and residual [T, H] and weight [H]; grid (T,)."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    dtype = x.dtype.element_ty
    row = tl.load(x + at, inside, 0.0).to(tl.float32)
    if ADDS:
        row += tl.load(residual + at, inside, 0.0).to(tl.float32)
        tl.store(total + at, row.to(dtype), inside)
        row = row.to(dtype).to(tl.float32)  # the norm is of the rounded sum, as in transformers
    scale = tl.rsqrt(tl.sum(row * row, 0) / width + eps)
    normed = (row * scale).to(dtype).to(tl.float32)
    scaled = normed * tl.load(weight + column, inside, 0.0).to(tl.float32)
    tl.store(y + at, scaled.to(y.dtype.element_ty), inside)


def build(width: int, adds: bool) -> Build:
    """How rows of this width are compiled."""
    block = next_power_of_2(width)
    return Build(
        constants={"ADDS": adds, "BLOCK": block},
        num_warps=min(max(block // 512, 1), 16),
        num_stages=1,
        fp_fusion=False,  # squares are rounded before they are summed, as torch rounds them
    )


def launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, total) for checked arguments; total is x (contiguous) where there is no residual."""
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype))
    total = x if residual is None else torch.empty_like(x)
    residual = x if residual is None else residual.contiguous()
    rows, width = x.shape
    kernel = build(width, total is not x)
    kernel.run(add_rms_norm_kernel, (rows,), x, residual, weight, y, total, width, eps)
    return y, total


def _spec(width: int, dtype: torch.dtype, adds: bool = True) -> Spec:
    pointers = ("x", "residual", "weight", "y", "total")
    return Spec(
        name=f"{'add_' if adds else ''}rms_norm {width} {TYPES[dtype]}",
        kernel=add_rms_norm_kernel,
        types=dict.fromkeys(pointers, f"*{TYPES[dtype]}") | {"width": "i32", "eps": "fp32"},
        aligned=(*pointers, "width"),
        build=build(width, adds),
    )


SPECS = (
    *(_spec(width, torch.bfloat16) for width in (576, 896, 1536, 3584, 8192)),
    _spec(896, torch.bfloat16, adds=False),
    _spec(896, torch.float32),
)
