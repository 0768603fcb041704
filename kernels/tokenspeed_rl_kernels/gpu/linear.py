"""`linear` on a GPU: which of three products runs, and the two that are ours.

- Invariant: always the tile kernel, whatever the number of rows.
- Otherwise one row: the GEMV, which has more programs than the tile kernel and needs no matrix
  instructions; 2 to 16 rows: the tile kernel, one block of rows; more: torch's. From one of these to the
  next a row moves by rounding.

Ours read a weight from memory once, and every 16 rows again from the L2 cache. So programs that are
neighbours in time share a weight tile, not a row tile: an output head of 272 MB doesn't fit that cache, rows
mostly do.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_rl_kernels.checks import misfit
from tokenspeed_rl_kernels.gpu.kernel import TYPES, Build, Spec, cdiv, next_power_of_2
from tokenspeed_rl_kernels.gpu.product_tile import product_tile

TILE_ROWS = 16
"""Rows of a tile: the least that matrix instructions take. From 64 on Hopper sums in another order."""


@triton.jit(do_not_specialize=["rows"])
def tile_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    columns,
    width,
    x_stride,
    weight_stride,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [rows, columns]; grid (blocks of rows, blocks of columns): the first runs fastest."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    y = product_tile(
        x, x_stride, row, rows, weight, weight_stride, column, columns, width, BLOCK_M, BLOCK_N, BLOCK_K
    )
    if BIAS:  # before the only rounding, as in cuBLAS
        y += tl.load(bias + column, column < columns, 0.0).to(tl.float32)[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), inside)


@triton.jit
def gemv_kernel(
    x,
    weight,
    bias,
    out,
    columns,
    width,
    weight_stride,
    BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [columns] of x [width]; grid (blocks of columns)."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, BLOCK_K)
    weight += column.to(tl.int64)[:, None] * weight_stride + at[None, :]
    acc = tl.zeros([COLUMNS, BLOCK_K], tl.float32)
    for start in range(0, width, BLOCK_K):
        inside = at < width - start
        a = tl.load(x + start + at, inside, 0.0).to(tl.float32)
        b = tl.load(weight + start, inside[None, :] & (column < columns)[:, None], 0.0).to(tl.float32)
        acc += a[None, :] * b
    y = tl.sum(acc, 1)
    if BIAS:
        y += tl.load(bias + column, column < columns, 0.0).to(tl.float32)
    tl.store(out + column, y.to(out.dtype.element_ty), column < columns)


def tile_build(columns: int, dtype: torch.dtype, bias: bool) -> Build:
    """The tile kernel for weights of so many rows.

    Narrow tiles where there are few columns, so that there are programs enough for all processors; long ones
    then, to have as many bytes under way.
    """
    if dtype == torch.float32:
        block_n, block_k, warps, stages = (16 if columns <= 4096 else 32), 64, 4, 3
    elif columns <= 4096:
        block_n, block_k, warps, stages = 16, 256, 4, 4
    elif columns <= 16384:
        block_n, block_k, warps, stages = 32, 128, 4, 5
    else:
        block_n, block_k, warps, stages = 64, 128, 8, 4
    constants = {"BIAS": bias, "BLOCK_M": TILE_ROWS, "BLOCK_N": block_n, "BLOCK_K": block_k}
    return Build(constants=constants, num_warps=warps, num_stages=stages)


def gemv_build(columns: int, width: int, bias: bool) -> Build:
    """The GEMV: a program has up to 8192 weights under way, of few rows where there are few."""
    held = 1 if columns <= 2048 else 2 if columns <= 16384 else 8
    block = min(next_power_of_2(width), 4096, 8192 // held)
    return Build(constants={"BIAS": bias, "COLUMNS": held, "BLOCK_K": block}, num_stages=1)


def launch(x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool) -> Tensor:
    """The op, for checked arguments."""
    rows, (columns, width) = len(x), weight.shape
    if rows > TILE_ROWS and not invariant:
        return F.linear(x, weight, bias)
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise misfit("dtype has no kernel", x.dtype, "pass bfloat16, float16 or float32")
    x, weight = (t if t.stride(1) == 1 else t.contiguous() for t in (x, weight))
    held = x if bias is None else bias.contiguous()
    out = x.new_empty(rows, columns)
    if rows == 1 and not invariant:
        gemv = gemv_build(columns, width, bias is not None)
        grid = (cdiv(columns, gemv.constants["COLUMNS"]),)
        gemv.run(gemv_kernel, grid, x, weight, held, out, columns, width, weight.stride(0))
        return out
    tile = tile_build(columns, x.dtype, bias is not None)
    tile.run(
        tile_kernel,
        (cdiv(rows, TILE_ROWS), cdiv(columns, tile.constants["BLOCK_N"])),
        *(x, weight, held, out, rows, columns, width, x.stride(0), weight.stride(0)),
    )
    return out


def _specs(name: str, columns: int, width: int, bias: bool, dtype: torch.dtype) -> tuple[Spec, Spec]:
    """Both kernels for one weight."""
    pointers = dict.fromkeys(("x", "weight", "bias", "out"), f"*{TYPES[dtype]}")
    sizes, strides = ("columns", "width"), ("x_stride", "weight_stride")
    half = dtype != torch.float32
    return (
        Spec(
            name=f"linear tile {name} {TYPES[dtype]}",
            kernel=tile_kernel,
            types=pointers | dict.fromkeys(("rows", *sizes, *strides), "i32"),
            aligned=(*pointers, *sizes, *strides),
            build=tile_build(columns, dtype, bias),
            wants_mma=half,
            wants_async=True,
        ),
        Spec(
            name=f"linear gemv {name} {TYPES[dtype]}",
            kernel=gemv_kernel,
            types=pointers | dict.fromkeys((*sizes, "weight_stride"), "i32"),
            aligned=(*pointers, *sizes, "weight_stride"),
            build=gemv_build(columns, width, bias),
        ),
    )


_BF16, _FP32 = torch.bfloat16, torch.float32
SPECS = (
    *_specs("0.5B qkv", 1152, 896, True, _BF16),
    *_specs("0.5B gate_up", 9728, 896, False, _BF16),
    *_specs("0.5B down", 896, 4864, False, _BF16),
    *_specs("0.5B head", 151936, 896, False, _BF16),
    *_specs("1.5B qkv", 2048, 1536, True, _BF16),
    *_specs("1.5B gate_up", 17920, 1536, False, _BF16),
    *_specs("1.5B down", 1536, 8960, False, _BF16),
    *_specs("0.5B qkv", 1152, 896, True, _FP32),
    *_specs("0.5B gate_up", 9728, 896, False, _FP32),
)
