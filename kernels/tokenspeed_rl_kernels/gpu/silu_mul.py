"""`silu_mul`: a program per block of columns of a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_rl_kernels.gpu.kernel import TYPES, Build, Spec, cdiv

BLOCK = 1024


@triton.jit
def silu_mul_kernel(x, out, width, BLOCK: tl.constexpr):
    """out [T, I] of x [T, 2I], both contiguous; grid (T, blocks)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + row * 2 * width + column, inside, 0.0).to(tl.float32)
    value = tl.load(x + row * 2 * width + width + column, inside, 0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    gated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)  # rounded here, as transformers does
    tl.store(out + row * width + column, (gated * value).to(dtype), inside)


BUILD = Build(constants={"BLOCK": BLOCK}, num_stages=1)


def launch(x: Tensor) -> Tensor:
    """The op, for a checked x [T, 2I]."""
    x = x.contiguous()
    out = x.new_empty(len(x), x.shape[1] // 2)
    BUILD.run(silu_mul_kernel, (len(x), cdiv(out.shape[1], BLOCK)), x, out, out.shape[1])
    return out


SPECS = tuple(
    Spec(
        name=f"silu_mul {TYPES[dtype]}",
        kernel=silu_mul_kernel,
        types={"x": f"*{TYPES[dtype]}", "out": f"*{TYPES[dtype]}", "width": "i32"},
        aligned=("x", "out", "width"),
        build=BUILD,
    )
    for dtype in (torch.bfloat16, torch.float32)
)
