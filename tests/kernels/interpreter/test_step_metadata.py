"""Positions, slots and work of a decode step, in Triton."""

import pytest
import torch

from tokenspeed_rl_kernels.decode_work import DecodeWork, Sharing, max_splits
from tokenspeed_rl_kernels.step_metadata import CASES, reference, step_metadata


def inputs_of(case):
    generator, batch = torch.Generator().manual_seed(0), len(case.lens)
    lens = torch.tensor(case.lens, dtype=torch.int32)
    table = torch.randint(0, 2**31 - 1, (batch, case.columns), generator=generator, dtype=torch.int32)
    groups = len(case.prefix)
    group_of_row = torch.arange(batch, dtype=torch.int32) % (groups + 1)
    prefix_lens = torch.tensor(case.prefix, dtype=torch.int32)
    fits = (group_of_row < groups) & (torch.cat((prefix_lens, torch.zeros(1)))[group_of_row] <= lens)
    group_of_row[~fits] = -1
    sharing = Sharing.of((torch.zeros(groups, 1), prefix_lens, group_of_row), case.rows_per_item)
    work = DecodeWork.empty(sharing, max_splits(case.columns, case.page_size))
    work.items.fill_(-7)
    return lens, table, work, torch.full((batch,), 9), torch.full((batch,), 9)


@pytest.mark.parametrize("advance", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference(case, advance):
    """Every tensor is that of the reference, behind the last item too: nothing else is written."""
    ours, expected = inputs_of(case), inputs_of(case)
    step_metadata(*ours, page_size=case.page_size, advance=advance)
    reference(*expected, page_size=case.page_size, advance=advance)
    for mine, its in zip(ours, expected, strict=True):
        if isinstance(mine, DecodeWork):
            assert torch.equal(mine.items, its.items) and torch.equal(mine.num_items, its.num_items)
        else:
            assert torch.equal(mine, its)


def test_has_a_fake():
    """The registered op says what it writes."""
    lens, table, work, positions, slots = inputs_of(CASES[0])
    tensors = lens, table, *work.sharing, positions, slots, work.items, work.num_items
    op, checks = torch.ops.tokenspeed_rl.step_metadata.default, ("test_schema", "test_faketensor")
    torch.library.opcheck(op, tensors, {"page_size": 16, "advance": True}, test_utils=checks)
