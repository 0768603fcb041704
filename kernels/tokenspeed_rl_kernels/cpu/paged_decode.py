"""`paged_decode` in plain torch: pages copied together, then one product per chunk of rows.

What depends on lengths and pages alone is worked out once and serves all layers. A prefix that rows share is
read once: its queries form one larger attention, merged with each row's own by log-sum-exp.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed_rl_kernels.attention_options import AttentionOptions, Shared
from tokenspeed_rl_kernels.checks import check_lens, check_shared, misfit
from tokenspeed_rl_kernels.cpu.page_reads import Reads, Scratch, attend, plan_reads

LEAST_SPARED_BYTES = 2 << 20
"""Prefixes whose sharing spares less reading per layer are read by each row: measured, that is faster."""


@dataclass(slots=True)
class _Groups:
    """Rows that share a prefix, and how they are laid out to read it once."""

    reads: Reads
    """Reads of the prefixes, a row per group."""
    members: Tensor
    """[G, R] int64: rows of each group, padded with any row."""
    place: Tensor
    """[B] int64: a row's place in the flattened ``members``; any, for a row without a group."""
    alone: Tensor
    """[B, 1] bool: rows without a group."""


@dataclass(slots=True)
class DecodePlan:
    """What `decode_with` must know of lengths and pages; holds while those stay, for caches of one shape."""

    rows: Reads
    groups: _Groups | None
    scratch: Scratch


def plan_decode(
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    window: int | None = None,
    shared: Shared | None = None,
) -> DecodePlan:
    """Plan a `paged_decode` for all layers whose caches have this shape; arguments and errors as there."""
    lens, size = seq_lens.tolist(), k_cache.shape[2]
    check_lens(lens, [0] * len(lens), size, page_table.shape[1])
    firsts = [0 if window is None else max(0, length - window) for length in lens]
    groups = None
    if shared is not None:
        group_of_row, prefixes = _check_groups(shared, lens, size)
        token_bytes = k_cache.element_size() * k_cache.shape[1] * (k_cache.shape[3] + v_cache.shape[3])
        spared = sum(prefixes[group] for group in group_of_row if group >= 0) - sum(prefixes)
        # A window reads few tokens of a row, and not the prefix's first: each row reads its own.
        if window is None and prefixes and spared * token_bytes >= LEAST_SPARED_BYTES:
            firsts = [prefixes[group] if group >= 0 else 0 for group in group_of_row]
            groups = _plan_groups(k_cache, v_cache, shared, group_of_row, prefixes)
    return DecodePlan(plan_reads(k_cache, v_cache, page_table, firsts, lens), groups, Scratch())


def decode_with(
    plan: DecodePlan, q: Tensor, k_cache: Tensor, v_cache: Tensor, options: AttentionOptions
) -> Tensor:
    """`paged_decode` as planned before: lengths, pages, window and sharing are the plan's."""
    (batch, heads, dim), kv_heads, sinks = q.shape, k_cache.shape[1], options.sinks
    wide = torch.promote_types(q.dtype, torch.float32)
    query = q.to(wide) * options.scale_for(dim)

    def read(reads: Reads, rows: Tensor) -> tuple[Tensor, Tensor]:
        lse = plan.groups is not None or sinks is not None
        return attend(reads, rows, k_cache, v_cache, plan.scratch, softcap=options.softcap, with_lse=lse)

    out, lse = read(plan.rows, query.reshape(batch * kv_heads, heads // kv_heads, dim))
    out = out.view(batch, heads, v_cache.shape[3])
    if plan.groups is not None:
        groups, width = plan.groups.members.shape
        rows = query.index_select(0, plan.groups.members.flatten()).view(groups, width, kv_heads, -1, dim)
        ahead = read(plan.groups.reads, rows.transpose(1, 2).reshape(groups * kv_heads, -1, dim))
        out, lse = _merge(plan.groups, out, lse.view(batch, heads), *ahead)
    if sinks is not None:
        out = out * torch.sigmoid(lse.view(batch, heads) - sinks.to(wide)).unsqueeze(2)
    return out.to(q.dtype)


def _merge(
    groups: _Groups, out: Tensor, lse: Tensor, ahead: Tensor, ahead_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """One softmax over a row's own tokens and its prefix, from that over each: they weigh as exp(lse).

    ``out`` [B, Hq, Dv] and ``lse`` [B, Hq] are the rows' own, ``ahead`` [G * Hkv, R * Hq / Hkv, Dv] and its
    ``ahead_lse`` the prefixes'.
    """
    count, width = groups.members.shape

    def by_row(part: Tensor) -> Tensor:
        part = part.view(count, -1, width, part.shape[1] // width, *part.shape[2:]).transpose(1, 2)
        return part.reshape(count * width, *lse.shape[1:], *part.shape[4:]).index_select(0, groups.place)

    ahead, ahead_lse = by_row(ahead), by_row(ahead_lse)
    merged = torch.lerp(out, ahead, torch.sigmoid(ahead_lse - lse).unsqueeze(2))
    # Rows alone were given some other row's prefix, whose numbers, NaN perhaps, are none of their business.
    return (
        torch.where(groups.alone.unsqueeze(2), out, merged),
        torch.where(groups.alone, lse, torch.logaddexp(lse, ahead_lse)),
    )


def _plan_groups(
    k_cache: Tensor, v_cache: Tensor, shared: Shared, group_of_row: list[int], prefixes: list[int]
) -> _Groups:
    members: list[list[int]] = [[] for _ in prefixes]
    for row, group in enumerate(group_of_row):
        if group >= 0:
            members[group].append(row)
    width = max(1, max(map(len, members)))
    place = [0] * len(group_of_row)
    for group, rows in enumerate(members):
        for rank, row in enumerate(rows):
            place[row] = group * width + rank
    device = k_cache.device
    return _Groups(
        plan_reads(k_cache, v_cache, shared[0], [0] * len(prefixes), prefixes),
        torch.tensor([rows + [0] * (width - len(rows)) for rows in members], device=device),
        torch.tensor(place, device=device),
        torch.tensor(group_of_row, device=device).lt(0).unsqueeze(1),
    )


def _check_groups(shared: Shared, lens: list[int], page_size: int) -> tuple[list[int], list[int]]:
    """The group of each row and the prefix length of each group, checked."""
    pages, prefix_lens, group_of_row = shared
    check_shared(shared, len(lens))
    groups, prefixes = group_of_row.tolist(), prefix_lens.tolist()
    for group, length in enumerate(prefixes):
        if length % page_size or not 0 < length <= pages.shape[1] * page_size:
            raise misfit(f"prefix length of group {group} misfits", length, "share whole pages, all listed")
    for row, group in enumerate(groups):
        if not -1 <= group < len(prefixes) or (group >= 0 and prefixes[group] > lens[row]):
            fix = "name a group whose prefix the row's context covers, or -1"
            raise misfit(f"group of row {row} doesn't fit", group, fix)
    return groups, prefixes
