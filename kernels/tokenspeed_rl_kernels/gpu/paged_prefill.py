"""`paged_prefill`: a program per tile of queries. See `attention_tile` for what makes it equal to decode."""

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_rl_kernels.attention_options import AttentionOptions
from tokenspeed_rl_kernels.gpu.attention_shape import SHAPES, AttentionShape, factors, spec, window_of
from tokenspeed_rl_kernels.gpu.attention_tile import (
    attend_split,
    finish,
    load_rows,
    merge,
    store_rows,
)
from tokenspeed_rl_kernels.gpu.kernel import Build


@triton.jit
def place_of(query_start, rows, TOKENS: tl.constexpr):
    """The row whose queries this program takes, and which of its tiles.

    Row b has the tiles from query_start[b] // TOKENS + b on, which are as many as it needs or one more.
    """
    row, tile = -1, 0
    for start in range(0, rows, 128):
        at = start + tl.arange(0, 128)
        first_tile = tl.load(query_start + at, at < rows, 0) // TOKENS + at
        begun = (at < rows) & (first_tile <= tl.program_id(0))
        row += tl.sum(begun.to(tl.int32), 0)
        tile = tl.maximum(tile, tl.max(tl.where(begun, first_tile, 0), 0))
    return row, tl.program_id(0) - tile


@triton.jit(do_not_specialize=("rows", "table_stride", "window"))
def prefill_kernel(
    q,
    k_cache,
    v_cache,
    page_table,
    query_start,
    seq_lens,
    sinks,
    out,
    rows,
    table_stride,
    window,
    factor,
    cap,
    CAPPED: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Grid (tiles, key-value heads, head blocks)."""
    row, tile = place_of(query_start, rows, QUERIES // HEADS)
    start, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    kv_head = tl.program_id(1)
    lane = tl.arange(0, QUERIES)
    head = tl.program_id(2) * HEADS + lane % HEADS
    tokens = tl.minimum(QUERIES // HEADS, end - start - tile * (QUERIES // HEADS))
    if tokens <= 0:
        return
    token = start + tile * (QUERIES // HEADS) + lane // HEADS
    inside = (lane // HEADS < tokens) & (head < GROUP)
    last = tl.load(seq_lens + row) - end + start + tile * (QUERIES // HEADS) + tokens
    stop = tl.where(inside, last - tokens + lane // HEADS + 1, 0)
    first = tl.maximum(last - tokens + 1 - window, 0)
    query = (token * KV_HEADS + kv_head) * GROUP + head
    queries = load_rows(q, query, inside, DIM, PADDED)
    pages = page_table + row.to(tl.int64) * table_stride
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, VALUE_PADDED], tl.float32)
    for begin in range(first // SPLIT * SPLIT, last, SPLIT):
        top_next, mass_next, acc_next = attend_split(
            queries,
            stop,
            tl.maximum(first, begin),
            tl.minimum(last, begin + SPLIT),
            pages,
            k_cache,
            v_cache,
            kv_head,
            window,
            factor,
            cap,
            CAPPED,
            KV_HEADS,
            PAGE,
            DIM,
            VALUE_DIM,
            PADDED,
            VALUE_PADDED,
            QUERIES,
            KEYS,
        )
        top, mass, acc = merge(top, mass, acc, top_next, mass_next, acc_next)
    acc = finish(top, mass, acc, sinks, kv_head * GROUP + head, inside, SINKS)
    store_rows(out, query, inside, acc, VALUE_DIM, VALUE_PADDED)


@cache
def build(shape: AttentionShape) -> Build:
    """How the kernel is compiled."""
    return shape.build({"SINKS": shape.sinks})


def launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """The op, for checked arguments; lengths and starts are the kernel's to read."""
    shape = AttentionShape.of(q, k_cache, v_cache, options)
    rows, q = len(seq_lens), q.contiguous()
    page_table, query_start, seq_lens = (x.int().contiguous() for x in (page_table, query_start, seq_lens))
    out = q.new_empty(*q.shape[:2], shape.value_dim)
    build(shape).run(
        prefill_kernel,
        (len(q) // shape.tile_tokens + rows if len(q) else 0, shape.kv_heads, shape.head_blocks),
        q,
        k_cache,
        v_cache,
        page_table,
        query_start,
        seq_lens,
        out if options.sinks is None else options.sinks.contiguous(),
        out,
        rows,
        page_table.stride(0),
        window_of(options),
        *factors(options, shape.dim),
    )
    return out


SPECS = tuple(
    spec(
        f"paged_prefill, {name}",
        prefill_kernel,
        build(shape),
        shape,
        "q k_cache v_cache page_table query_start seq_lens sinks out rows table_stride window factor cap",
    )
    for name, shape in SHAPES.items()
)
