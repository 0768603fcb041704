"""A tile of x W^T: what every product of ours is made of."""

import triton
import triton.language as tl


@triton.jit
def product_tile(
    x,
    x_stride,
    row,
    rows,
    weight,
    weight_stride,
    column,
    columns,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[M, N] float32: rows `row` [M] of x times rows `column` [N] of the weight, 0 past the last of either.

    The sum over the width goes from its start to its end in steps of a constant size and is never split: a
    row's bits depend neither on the rows beside it nor on its own place.
    """
    at = tl.arange(0, BLOCK_K)
    x += row.to(tl.int64)[:, None] * x_stride + at[None, :]
    weight += column.to(tl.int64)[:, None] * weight_stride + at[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, width, BLOCK_K):
        inside = at[None, :] < width - start
        a = tl.load(x + start, inside & (row < rows)[:, None], 0.0)
        b = tl.load(weight + start, inside & (column < columns)[:, None], 0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    return acc
