"""What a decode step must know: rows' slots, and who reads what."""

import pytest
import torch

from tokenspeed_rl_kernels.decode_work import DecodeWork, Sharing, max_splits
from tokenspeed_rl_kernels.step_metadata import step_metadata


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_rows_that_share_become_neighbours():
    """Members of a group follow each other; every so many, one of them reads the prefix for the next ones."""
    shared = torch.zeros(2, 40), int32(512, 300), int32(1, -1, 0, 0, 1, 0)
    sharing = Sharing.of(shared, rows_per_item=2)
    assert sharing.order.tolist() == [2, 3, 5, 0, 4, 1]
    assert sharing.prefix_lens.tolist() == [512, 512, 512, 300, 300, 0]
    assert sharing.leads.tolist()[:5] == [2, 0, 1, 2, 0]


def test_a_step():
    """Lengths grow, absent rows stay away, shared splits are read by the first of those that share them."""
    sharing = Sharing(int32(2, 0, 1, 3), int32(256, 256, 0, 0), int32(2, 0, 1, 1))
    table = torch.arange(4 * 40, dtype=torch.int32).view(4, 40)
    lens, work = int32(300, -1, 511, 639), DecodeWork.empty(sharing, max_splits(40, 16))
    positions, slots = torch.empty(2, 4, dtype=torch.int64)
    step_metadata(lens, table, work, positions, slots, page_size=16, advance=True)
    assert lens.tolist() == [301, -1, 512, 640]
    assert positions.tolist() == [300, 0, 511, 639]
    assert slots.tolist() == [18 * 16 + 12, -1, (80 + 31) * 16 + 15, (120 + 39) * 16 + 15]
    assert work.items[: int(work.num_items)].tolist() == [
        [0, 2, 0], [0, 1, 1], [1, 1, 1], [3, 1, 0], [3, 1, 1], [3, 1, 2],
    ]  # fmt: skip
    step_metadata(lens, table, work, positions, slots, page_size=16, advance=True)
    assert (lens[3], slots[3]) == (641, -1)  # a token for which the table has no page


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"seq_lens": torch.zeros(1025, dtype=torch.int32)}, "too many rows: got 1025"),
        ({"slots": torch.zeros(3, dtype=torch.int64)}, "rows misfit"),
        ({"page_table": torch.zeros(2, 640, dtype=torch.int32)}, "make room for 80 items"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int64)}, "pass int32"),
        ({"slots": torch.zeros(2, dtype=torch.int32)}, "pass int64"),
        ({"slots": torch.zeros(4, dtype=torch.int64)[::2]}, "contiguous"),
        ({"positions": torch.zeros(1, dtype=torch.int64).expand(2)}, "contiguous"),
        ({"work": DecodeWork(Sharing.none(2, "cpu"), int32(0, 0), int32(0))}, "work misshapen"),
        ({"work": DecodeWork.empty(Sharing.none(2, "cpu"), 1)._replace(num_items=int32())}, "num_items"),
    ],
)
def test_misfits_are_refused(change, word):
    """A misfit raises ValueError that says what is wrong and what it got, before anything is written."""
    arguments = {
        "seq_lens": torch.zeros(2, dtype=torch.int32),
        "page_table": torch.zeros(2, 16, dtype=torch.int32),
        "work": DecodeWork.empty(Sharing.none(2, "cpu"), 1),
        "positions": torch.zeros(2, dtype=torch.int64),
        "slots": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=word):
        step_metadata(**{**arguments, **change}, page_size=16, advance=False)
