"""How the decode rows of a step are cut into pieces of work for `paged_decode`'s kernel."""

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_rl_kernels.attention_options import Shared

SPLIT = 256
"""Tokens of a context that one program reads, counted from its first token: never a matter of the batch."""


class Sharing(NamedTuple):
    """Which rows read which prefixes together.

    Rows are put in an order where those that share are neighbours: a row's place is its rank in it.
    """

    order: Tensor
    """[B] int32: the row at each place."""
    prefix_lens: Tensor
    """[B] int32: length of the prefix that the row at each place shares; 0 for none."""
    leads: Tensor
    """[B] int32: of how many rows, from this place on, this place's row reads the prefix; 0: another does."""

    @classmethod
    def none(cls, batch: int, device: torch.device | str) -> "Sharing":
        """Every row alone."""
        order = torch.arange(batch, dtype=torch.int32, device=device)
        return cls(order, torch.zeros_like(order), torch.ones_like(order))

    @classmethod
    def of(cls, shared: Shared, rows_per_item: int) -> "Sharing":
        """Groups as `paged_decode` takes them, at most ``rows_per_item`` rows reading together; no wait."""
        _, prefix_lens, group_of_row = shared
        alone = torch.full_like(group_of_row, len(prefix_lens))
        groups, order = torch.where(group_of_row < 0, alone, group_of_row).sort(stable=True)
        first, stop = torch.searchsorted(groups, groups), torch.searchsorted(groups, groups, right=True)
        rank = torch.arange(len(groups), device=groups.device) - first
        leads = torch.where(rank % rows_per_item == 0, (stop - first - rank).clamp(max=rows_per_item), 0)
        lens = torch.cat((prefix_lens, prefix_lens.new_zeros(1)))[groups.long()]
        return cls(order.int(), lens.int(), leads.int())


class DecodeWork(NamedTuple):
    """Items of work: what a program does at a time. `step_metadata` writes them, on the device."""

    sharing: Sharing
    items: Tensor
    """[capacity, 3] int32 (place, count, split): the rows at ``count`` places from this one on read this
    split, through the page table of the first."""
    num_items: Tensor
    """[1] int32."""

    @classmethod
    def empty(cls, sharing: Sharing, max_splits: int) -> "DecodeWork":
        """Room for the work of these rows, whose contexts have at most so many splits."""
        order = sharing.order
        return cls(sharing, order.new_empty(len(order) * max_splits, 3), order.new_zeros(1))


def max_splits(columns: int, page_size: int) -> int:
    """The most splits that a context of this many pages has."""
    return -(-columns * page_size // SPLIT)
