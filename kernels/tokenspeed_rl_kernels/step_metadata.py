"""What a decode step must know beside its tokens: where they go in the cache, and what attention has to read.

One launch, and nothing that the host must know: a captured CUDA graph moves on by itself, token after token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed_rl_kernels.checks import misfit, shapes
from tokenspeed_rl_kernels.decode_work import SPLIT, DecodeWork, Sharing, max_splits
from tokenspeed_rl_kernels.registry import op, runs_triton

MOST_ROWS = 1024
"""One program does it all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A shape to test and to time."""

    name: str
    lens: tuple[int, ...]
    columns: int = 64
    page_size: int = 16
    prefix: tuple[int, ...] = ()
    """Shared prefix length per group; row b is in group b % (groups + 1), the last of which means none."""
    rows_per_item: int = 4


CASES = (
    Case(name="one row", lens=(37,)),
    Case(name="no rows", lens=()),
    Case(name="ragged", lens=(1, 255, 256, 257, 1000, 512)),
    Case(name="inactive rows", lens=(300, -1, 0, -1, 600)),
    Case(name="page 1", lens=(9, 600), page_size=1, columns=700),
    Case(name="shared prefix", lens=(600,) * 9, prefix=(512,), rows_per_item=2),
    Case(name="shared prefixes", lens=tuple(range(520, 980, 20)), prefix=(512, 272)),
    Case(name="shared prefix of less than a split", lens=(300,) * 4, prefix=(240,)),
    Case(name="many rows", lens=tuple(range(1000)), prefix=(256, 512)),
)


def _fake(
    seq_lens: Tensor,
    page_table: Tensor,
    order: Tensor,
    prefix_lens: Tensor,
    leads: Tensor,
    positions: Tensor,
    slots: Tensor,
    items: Tensor,
    num_items: Tensor,
    *,
    page_size: int,
    advance: bool,
) -> None:
    return None


@op(_fake, mutates=("seq_lens", "positions", "slots", "items", "num_items"))
def _step_metadata(
    seq_lens: Tensor,
    page_table: Tensor,
    order: Tensor,
    prefix_lens: Tensor,
    leads: Tensor,
    positions: Tensor,
    slots: Tensor,
    items: Tensor,
    num_items: Tensor,
    *,
    page_size: int,
    advance: bool,
) -> None:
    work = DecodeWork(Sharing(order, prefix_lens, leads), items, num_items)
    arguments = seq_lens, page_table, work, positions, slots
    if runs_triton(seq_lens):
        from tokenspeed_rl_kernels.gpu import step_metadata as gpu

        return gpu.launch(*arguments, page_size=page_size, advance=advance)
    return reference(*arguments, page_size=page_size, advance=advance)


def step_metadata(
    seq_lens: Tensor,
    page_table: Tensor,
    work: DecodeWork,
    positions: Tensor,
    slots: Tensor,
    *,
    page_size: int,
    advance: bool,
) -> None:
    """Write a decode step's positions, slots and work; first count the step's token, if ``advance``.

    Args:
        seq_lens: [B] int32 context lengths; written to. A row with a negative length isn't there.
        page_table: [B, n] int32 page ids, contiguous.
        work: who shares a prefix, read; the items, written. Whoever shares a prefix has it in its context.
        positions: [B] int64, written: of each row's last token; 0 where there is none.
        slots: [B] int64, written: page * page_size + offset of each row's last token; -1 where there is none,
            or no page for it in the table.
        page_size: tokens per page.
        advance: whether lengths grow by one before all else.

    Raises:
        ValueError: a shape or dtype doesn't fit.
    """
    _check(seq_lens, page_table, work, positions, slots, page_size)
    _step_metadata(
        seq_lens,
        page_table,
        *work.sharing,
        positions,
        slots,
        work.items,
        work.num_items,
        page_size=page_size,
        advance=advance,
    )


def _check(
    seq_lens: Tensor, page_table: Tensor, work: DecodeWork, positions: Tensor, slots: Tensor, page_size: int
) -> None:
    batch, indices = len(seq_lens), (seq_lens, page_table, *work.sharing, work.items, work.num_items)
    if batch > MOST_ROWS:
        raise misfit("too many rows", batch, f"decode at most {MOST_ROWS} rows in a step")
    rows = (*work.sharing, positions, slots)
    if page_table.ndim != 2 or len(page_table) != batch or any(x.shape != (batch,) for x in rows):
        got = shapes(seq_lens=seq_lens, page_table=page_table, positions=positions, slots=slots)
        raise misfit("rows misfit", got, "pass page_table [B, n], and [B] of all else")
    if len(work.items) < (need := batch * max_splits(page_table.shape[1], page_size)):
        raise misfit("too little room for work", len(work.items), f"make room for {need} items")
    if any(x.dtype != torch.int32 or not x.is_contiguous() for x in indices):
        raise misfit("indices misfit", [x.dtype for x in indices], "pass int32, contiguous")
    if work.items.shape[1:] != (3,) or work.num_items.shape != (1,):
        got = shapes(items=work.items, num_items=work.num_items)
        raise misfit("work misshapen", got, "pass items [n, 3] and num_items [1]")
    results = positions, slots
    if any(x.dtype != torch.int64 or not x.is_contiguous() for x in results):
        found = [(x.dtype, x.stride()) for x in results]
        raise misfit("results misfit", found, "pass int64 positions and slots, contiguous")


def reference(
    seq_lens: Tensor,
    page_table: Tensor,
    work: DecodeWork,
    positions: Tensor,
    slots: Tensor,
    *,
    page_size: int,
    advance: bool,
) -> None:
    """`step_metadata` row by row."""
    if advance:
        seq_lens += seq_lens >= 0
    lens, room = seq_lens.tolist(), page_table.shape[1] * page_size
    for row, length in enumerate(lens):
        positions[row], slots[row] = max(length - 1, 0), -1
        if 0 < length <= room:
            page, offset = divmod(length - 1, page_size)
            slots[row] = int(page_table[row, page]) * page_size + offset
    items: list[tuple[int, int, int]] = []
    for place, (row, prefix, leads) in enumerate(zip(*(part.tolist() for part in work.sharing), strict=True)):
        shared, stop = prefix // SPLIT, -(-min(max(lens[row], 0), room) // SPLIT)
        if leads:
            items += [(place, leads, split) for split in range(shared)]
        items += [(place, 1, split) for split in range(shared, stop)]
    work.num_items.fill_(len(items))
    work.items[: len(items)] = torch.tensor(items, dtype=torch.int32).view(-1, 3)
