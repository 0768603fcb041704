"""`step_metadata`: one program, whose lanes are rows."""

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_rl_kernels.decode_work import SPLIT, DecodeWork
from tokenspeed_rl_kernels.gpu.kernel import Build, Spec, next_power_of_2


@triton.jit(do_not_specialize=("rows", "columns", "table_stride"))
def step_metadata_kernel(
    seq_lens,
    page_table,
    order,
    prefix_lens,
    leads,
    positions,
    slots,
    items,
    num_items,
    rows,
    columns,
    table_stride,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    ADVANCE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid (1,)."""
    row = tl.arange(0, ROWS)
    inside = row < rows
    length = tl.load(seq_lens + row, inside, -1)
    if ADVANCE:
        length = tl.where(length >= 0, length + 1, length)
        tl.debug_barrier()  # several threads may hold, and have read, one row's length
        tl.store(seq_lens + row, length, inside)
        tl.debug_barrier()  # it is read again below, at its place
    last = tl.maximum(length - 1, 0)
    held = inside & (length > 0) & (last < columns * PAGE)
    page = tl.load(page_table + row.to(tl.int64) * table_stride + last // PAGE, held, 0).to(tl.int64)
    tl.store(positions + row, last.to(tl.int64), inside)
    tl.store(slots + row, tl.where(held, page * PAGE + last % PAGE, -1), inside)

    place = row
    length = tl.load(seq_lens + tl.load(order + place, inside, 0), inside, 0)
    shared = tl.load(prefix_lens + place, inside, 0) // SPLIT
    led = tl.load(leads + place, inside, 0)
    first = tl.where(led > 0, 0, shared)
    stop = tl.cdiv(tl.maximum(tl.minimum(length, columns * PAGE), 0), SPLIT)
    stop = tl.maximum(tl.where(led > 0, tl.maximum(stop, shared), stop), first)
    behind = tl.cumsum(stop - first, 0)
    tl.store(num_items, tl.sum(stop - first, 0))
    for split in range(0, tl.max(stop, 0)):
        item = items + (behind - stop + split) * 3
        wanted = (split >= first) & (split < stop)
        tl.store(item, place, wanted)
        tl.store(item + 1, tl.where(split < shared, led, 1), wanted)
        tl.store(item + 2, tl.zeros_like(place) + split, wanted)


def build(rows: int, page_size: int, advance: bool) -> Build:
    """For a step of so many rows at most."""
    constants = {
        "PAGE": page_size,
        "SPLIT": SPLIT,
        "ADVANCE": advance,
        "ROWS": max(128, next_power_of_2(rows)),
    }
    return Build(constants=constants, num_stages=1)


def launch(
    seq_lens: Tensor,
    page_table: Tensor,
    work: DecodeWork,
    positions: Tensor,
    slots: Tensor,
    *,
    page_size: int,
    advance: bool,
) -> None:
    """The op, for checked arguments."""
    rows, columns = page_table.shape
    build(rows, page_size, advance).run(
        step_metadata_kernel,
        (1,),
        seq_lens,
        page_table,
        *work.sharing,
        positions,
        slots,
        work.items,
        work.num_items,
        rows,
        columns,
        page_table.stride(0),
    )


def _spec(rows: int) -> Spec:
    ints = ("seq_lens", "page_table", "order", "prefix_lens", "leads")
    outputs = {"positions": "*i64", "slots": "*i64", "items": "*i32", "num_items": "*i32"}
    return Spec(
        name=f"step_metadata {rows} rows",
        kernel=step_metadata_kernel,
        types={
            **dict.fromkeys(ints, "*i32"),
            **outputs,
            **dict.fromkeys(("rows", "columns", "table_stride"), "i32"),
        },
        aligned=(*ints, *outputs),
        build=build(rows, 16, True),
    )


SPECS = (_spec(1), _spec(256), _spec(1024))
