"""`paged_decode`: splits of contexts, then their merge. See `attention_tile` for what is exact.

A program of the first kernel takes items of a worklist: one split, for a few rows that share it or for one.
It leaves a state per row, head and split; a program of the second merges those of a row and head. Whether a
split was shared can't be told from its states.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_rl_kernels.attention_options import AttentionOptions, Shared
from tokenspeed_rl_kernels.decode_work import DecodeWork, Sharing, max_splits
from tokenspeed_rl_kernels.gpu import step_metadata
from tokenspeed_rl_kernels.gpu.attention_shape import SHAPES, AttentionShape, factors, spec, window_of
from tokenspeed_rl_kernels.gpu.attention_tile import (
    attend_split,
    finish,
    load_rows,
    merge,
    span_of,
    store_rows,
)
from tokenspeed_rl_kernels.gpu.kernel import Build, cdiv
from tokenspeed_rl_kernels.registry import INTERPRETED

PROGRAMS = 8 if INTERPRETED else 4 * 132
"""At most, of the first kernel: twice what an H200 runs at once. Those that find no work take time, too."""

AHEAD = 6
"""Splits whose states are being loaded at a time, or merged."""


@triton.jit(do_not_specialize=("table_stride", "max_splits", "window"))
def splits_kernel(
    q,
    k_cache,
    v_cache,
    page_table,
    seq_lens,
    order,
    items,
    num_items,
    tops,
    masses,
    accs,
    table_stride,
    max_splits,
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
):
    """Grid (programs, key-value heads, head blocks)."""
    kv_head = tl.program_id(1)
    lane = tl.arange(0, QUERIES)
    head = tl.program_id(2) * HEADS + lane % HEADS
    for at in range(tl.program_id(0), tl.load(num_items), tl.num_programs(0)):
        place, count, split = (
            tl.load(items + at * 3),
            tl.load(items + at * 3 + 1),
            tl.load(items + at * 3 + 2),
        )
        inside = (lane // HEADS < count) & (head < GROUP)
        row = tl.load(order + place + lane // HEADS, inside, 0)
        stop = tl.load(seq_lens + row, inside, 0)
        first, last = span_of(stop, window)
        first, last = tl.maximum(first, split * SPLIT), tl.minimum(last, split * SPLIT + SPLIT)
        if first < last:
            query = (row * KV_HEADS + kv_head) * GROUP + head
            pages = page_table + tl.load(order + place).to(tl.int64) * table_stride
            top, mass, acc = attend_split(
                load_rows(q, query, inside, DIM, PADDED),
                stop,
                first,
                last,
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
            state = query.to(tl.int64) * max_splits + split
            tl.store(tops + state, top, inside)
            tl.store(masses + state, mass, inside)
            store_rows(accs, state, inside, acc, VALUE_DIM, VALUE_PADDED)


@triton.jit(do_not_specialize=("max_splits", "window"))
def merge_kernel(
    tops,
    masses,
    accs,
    seq_lens,
    sinks,
    out,
    max_splits,
    window,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    SPLIT: tl.constexpr,
    SINKS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Grid (B, key-value heads, head blocks)."""
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    inside = head < GROUP
    head += tl.program_id(1) * GROUP
    query = tl.program_id(0) * tl.num_programs(1) * GROUP + head
    stop = tl.load(seq_lens + tl.program_id(0))
    first = tl.maximum(stop - window, 0) // SPLIT
    top = tl.full([HEADS], float("-inf"), tl.float32)
    mass = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, VALUE_PADDED], tl.float32)
    for split in tl.range(first, tl.cdiv(stop, SPLIT), num_stages=AHEAD):
        state = query.to(tl.int64) * max_splits + split
        top_next = tl.load(tops + state, inside, 0.0)
        mass_next = tl.load(masses + state, inside, 0.0)
        acc_next = load_rows(accs, state, inside, VALUE_DIM, VALUE_PADDED)
        top, mass, acc = merge(top, mass, acc, top_next, mass_next, acc_next)
    acc = finish(top, mass, acc, sinks, head, inside, SINKS)
    store_rows(out, query, inside, acc, VALUE_DIM, VALUE_PADDED)


class DecodeScratch(NamedTuple):
    """Where states lie between the two kernels; any layer's, one after another."""

    tops: Tensor
    """[B, Hq, splits] float32."""
    masses: Tensor
    """[B, Hq, splits] float32."""
    accs: Tensor
    """[B, Hq, splits, Dv] float32."""

    @classmethod
    def empty(
        cls, batch: int, heads: int, max_splits: int, value_dim: int, device: torch.device | str
    ) -> "DecodeScratch":
        """Room for so many rows at most, whose contexts have at most so many splits."""
        shape = batch, heads, max_splits
        # Apart: half of one tensor is aligned or not, as its size says, and kernels are compiled for either.
        tops, masses = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
        return cls(tops, masses, torch.empty(*shape, value_dim, dtype=torch.float32, device=device))


@cache
def builds(shape: AttentionShape) -> tuple[Build, Build]:
    """How both kernels are compiled."""
    splits = shape.build({})
    names = "VALUE_DIM", "VALUE_PADDED", "GROUP", "HEADS", "SPLIT"
    constants = {name: splits.constants[name] for name in names}
    constants |= {"SINKS": shape.sinks, "AHEAD": AHEAD}
    return splits, Build(constants=constants, num_warps=4, num_stages=1, fp_fusion=False)


def work_for(
    page_table: Tensor, seq_lens: Tensor, shared: Shared | None, shape: AttentionShape
) -> DecodeWork:
    """The work of one step, found on the device."""
    batch, columns = page_table.shape
    if shared is None:
        sharing = Sharing.none(batch, page_table.device)
    else:
        sharing = Sharing.of(shared, shape.tile_tokens)
    work = DecodeWork.empty(sharing, max_splits(columns, shape.page_size))
    unused = (seq_lens.new_empty(batch, dtype=torch.int64) for _ in range(2))
    step_metadata.launch(seq_lens, page_table, work, *unused, page_size=shape.page_size, advance=False)
    return work


def scratch_for(page_table: Tensor, shape: AttentionShape) -> DecodeScratch:
    """Room for these rows, however long their contexts grow."""
    batch, columns = page_table.shape
    splits = max_splits(columns, shape.page_size)
    return DecodeScratch.empty(batch, shape.heads, splits, shape.value_dim, page_table.device)


def decode_with(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    work: DecodeWork,
    scratch: DecodeScratch,
    options: AttentionOptions,
) -> Tensor:
    """`paged_decode`, for checked arguments and work that `step_metadata` wrote for these lengths.

    Waits for nothing and allocates its result alone; the scratch may be larger than needed.
    """
    shape = AttentionShape.of(q, k_cache, v_cache, options)
    splits, merged = builds(shape)
    window, heads = window_of(options), shape.kv_heads * shape.head_blocks
    q, splits_held = q.contiguous(), scratch.tops.shape[2]
    splits.run(
        splits_kernel,
        (min(cdiv(PROGRAMS, heads), len(work.items)), shape.kv_heads, shape.head_blocks),
        q,
        k_cache,
        v_cache,
        page_table,
        seq_lens,
        work.sharing.order,
        work.items,
        work.num_items,
        *scratch,
        page_table.stride(0),
        splits_held,
        window,
        *factors(options, shape.dim),
    )
    out = q.new_empty(*q.shape[:2], shape.value_dim)
    sinks = out if options.sinks is None else options.sinks.contiguous()
    grid = len(q), shape.kv_heads, shape.head_blocks
    merged.run(merge_kernel, grid, *scratch, seq_lens, sinks, out, splits_held, window)
    return out


def launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    shared: Shared | None,
    options: AttentionOptions,
) -> Tensor:
    """The op, for checked arguments."""
    shape = AttentionShape.of(q, k_cache, v_cache, options)
    page_table, seq_lens = page_table.int().contiguous(), seq_lens.int().contiguous()
    work = work_for(page_table, seq_lens, shared, shape)
    scratch = scratch_for(page_table, shape)
    return decode_with(q, k_cache, v_cache, page_table, seq_lens, work, scratch, options)


SPECS = tuple(
    found
    for name, shape in SHAPES.items()
    for found in (
        spec(
            f"paged_decode splits, {name}",
            splits_kernel,
            builds(shape)[0],
            shape,
            "q k_cache v_cache page_table seq_lens order items num_items tops masses accs table_stride"
            " max_splits window factor cap",
        ),
        spec(
            f"paged_decode merge, {name}",
            merge_kernel,
            builds(shape)[1],
            shape,
            "tops masses accs seq_lens sinks out max_splits window",
        ),
    )
)
