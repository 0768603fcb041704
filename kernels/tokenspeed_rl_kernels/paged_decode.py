"""Attention of one new query per row over a paged key-value cache.

    out[b, h] = sum_t softmax_t(scale * q[b, h] . k[b, h // G, t]) v[b, h // G, t]    for t < seq_lens[b]

with G = Hq / Hkv and, in this order, ``softcap``: s -> softcap * tanh(s / softcap); ``window``: only the last
``window`` tokens; ``sinks``: one more logit per head that takes probability and gives no value (gpt-oss).

What depends on lengths and pages alone is worked out once, by `plan_decode`, and serves all layers. A
prefix that rows share is read once: its queries form one larger attention, merged with each row's own by
log-sum-exp.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed_rl_kernels.checks import check_lens, check_options, check_paged, misfit, shapes
from tokenspeed_rl_kernels.page_reads import Reads, Scratch, attend, plan_reads

Shared = tuple[Tensor, Tensor, Tensor]
LEAST_SPARED_BYTES = 2 << 20
"""Prefixes whose sharing spares less reading per layer are read by each row: measured, that is faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A shape to test and to time."""

    name: str
    lens: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    value_dim: int | None = None
    page_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    prefix: tuple[int, ...] = ()
    """Shared prefix length per group; row b is in group b % (groups + 1), the last of which means none."""


CASES = (
    Case(name="one row", lens=(37,)),
    Case(name="ragged", lens=(1, 16, 17, 300, 64)),
    Case(name="equal lengths", lens=(40, 40, 40)),
    Case(name="empty rows", lens=(0, 5, 0, 33)),
    Case(name="smollm2", lens=(160, 171, 259, 203), heads=9, kv_heads=3),
    Case(name="multi-head", lens=(20, 33), heads=3, kv_heads=3, dim=80),
    Case(name="multi-query", lens=(20, 33), heads=7, kv_heads=1, dim=96),
    Case(name="group 6", lens=(50, 7), heads=12, kv_heads=2),
    Case(name="group 24", lens=(50, 7), heads=24, kv_heads=1),
    Case(name="values of another dim", lens=(50, 7), dim=192, value_dim=128),
    Case(name="page 1", lens=(9, 30), page_size=1),
    Case(name="page 32", lens=(9, 70), page_size=32),
    Case(name="window", lens=(1, 15, 16, 17, 100), window=16),
    Case(name="window 1", lens=(1, 16, 17, 40), window=1),
    Case(name="softcap", lens=(20, 90), softcap=5.0),
    Case(name="sinks", lens=(20, 0, 90), sinks=True),
    Case(name="shared prefix", lens=(70, 64, 90, 65, 200, 33), prefix=(64, 32)),
    Case(name="shared prefix, nothing after it", lens=(64, 64, 32), prefix=(64,)),
    Case(name="shared prefix, sinks", lens=(70, 64, 90, 65), prefix=(64, 32), sinks=True),
    Case(name="shared prefix, softcap", lens=(70, 64, 90, 65), prefix=(64, 32), softcap=5.0),
    Case(name="shared prefix, window", lens=(70, 64, 90, 65), prefix=(64, 32), window=20),
)


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    shared: Shared | None = None,
) -> Tensor:
    """Attend from one query per row; rows of length 0 give zeros.

    Args:
        q: [B, Hq, D]; Hq a multiple of Hkv.
        k_cache: [P, Hkv, S, D], of q's dtype. Slots that no row's context covers may hold anything, NaN too.
        v_cache: [P, Hkv, S, Dv].
        page_table: [B, n] int32 page ids; entries behind the context are never read.
        seq_lens: [B] int32 context lengths, the new token included.
        scale: factor on the scores; None: D ** -0.5.
        window: a row sees its last ``window`` tokens only.
        softcap: bound of the scores.
        sinks: [Hq] sink logits.
        shared: (prefix_pages [G, m], prefix_lens [G], group_of_row [B], -1: none), int32. The first
            ``prefix_lens[g]`` tokens, whole pages, of each row of group g lie in ``prefix_pages[g]``, which
            are read once for all of them. ``page_table`` and ``seq_lens`` describe whole contexts all the
            same: the result is that of ``shared=None``.

    Returns:
        [B, Hq, Dv] of q's dtype; scores, probabilities and sums are float32.

    Raises:
        ValueError: shapes, dtypes, lengths or groups don't fit.
    """
    check_paged(q, k_cache, v_cache, page_table, seq_lens)
    check_options(window, softcap, sinks, q.shape[1])
    plan = plan_decode(k_cache, v_cache, page_table, seq_lens, window=window, shared=shared)
    return decode_with(plan, q, k_cache, v_cache, scale=scale, softcap=softcap, sinks=sinks)


def reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`paged_decode` row by row, in float32 (float64 for float64 inputs)."""
    group, size = q.shape[1] // k_cache.shape[1], k_cache.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:2], v_cache.shape[3])
    for row, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        first = 0 if window is None else max(0, length - window)
        pages = page_table[row, : -(-length // size)].long()
        k = k_cache[pages].transpose(1, 2).flatten(0, 1)[first:length].to(wide)  # [t, Hkv, D]
        v = v_cache[pages].transpose(1, 2).flatten(0, 1)[first:length].to(wide)
        scores = torch.einsum("hd,thd->ht", q[row].to(wide), k.repeat_interleave(group, 1))
        scores = scores * (q.shape[2] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(wide).unsqueeze(1)), 1)
        weights = scores.softmax(1)[:, : v.shape[0]]
        out[row] = torch.einsum("ht,thd->hd", weights, v.repeat_interleave(group, 1)).to(q.dtype)
    return out


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
    check_options(window, None, None, 0)
    lens, size = seq_lens.tolist(), k_cache.shape[2]
    check_lens(lens, [0] * len(lens), size, page_table.shape[1])
    firsts = [0 if window is None else max(0, length - window) for length in lens]
    groups = None
    if shared is not None:
        group_of_row, prefixes = _check_shared(shared, lens, size)
        token_bytes = k_cache.element_size() * k_cache.shape[1] * (k_cache.shape[3] + v_cache.shape[3])
        spared = sum(prefixes[group] for group in group_of_row if group >= 0) - sum(prefixes)
        # A window reads few tokens of a row, and not the prefix's first: each row reads its own.
        if window is None and prefixes and spared * token_bytes >= LEAST_SPARED_BYTES:
            firsts = [prefixes[group] if group >= 0 else 0 for group in group_of_row]
            groups = _plan_groups(k_cache, v_cache, shared, group_of_row, prefixes)
    return DecodePlan(plan_reads(k_cache, v_cache, page_table, firsts, lens), groups, Scratch())


def decode_with(
    plan: DecodePlan,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`paged_decode` as planned before: lengths, pages, window and sharing are the plan's."""
    (batch, heads, dim), kv_heads = q.shape, k_cache.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    query = q.to(wide) * (dim**-0.5 if scale is None else scale)

    def read(reads: Reads, rows: Tensor) -> tuple[Tensor, Tensor]:
        lse = plan.groups is not None or sinks is not None
        return attend(reads, rows, k_cache, v_cache, plan.scratch, softcap=softcap, with_lse=lse)

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


def _check_shared(shared: Shared, lens: list[int], page_size: int) -> tuple[list[int], list[int]]:
    """The group of each row and the prefix length of each group, checked."""
    pages, prefix_lens, group_of_row = shared
    if pages.ndim != 2 or prefix_lens.shape != pages.shape[:1] or group_of_row.shape != (len(lens),):
        got = shapes(prefix_pages=pages, prefix_lens=prefix_lens, group_of_row=group_of_row)
        raise misfit("shared misshapen", got, "pass prefix_pages [G, m], prefix_lens [G], group_of_row [B]")
    groups, prefixes = group_of_row.tolist(), prefix_lens.tolist()
    for group, length in enumerate(prefixes):
        if length % page_size or not 0 < length <= pages.shape[1] * page_size:
            raise misfit(f"prefix length of group {group} misfits", length, "share whole pages, all listed")
    for row, group in enumerate(groups):
        if not -1 <= group < len(prefixes) or (group >= 0 and prefixes[group] > lens[row]):
            fix = "name a group whose prefix the row's context covers, or -1"
            raise misfit(f"group of row {row} doesn't fit", group, fix)
    return groups, prefixes
