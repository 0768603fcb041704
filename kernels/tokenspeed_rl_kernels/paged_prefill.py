"""Causal attention of each row's last tokens over a paged key-value cache: a prompt, or a chunk of one.

    out[i, h] = sum_t softmax_t(scale * q[i, h] . k[b, h // G, t]) v[b, h // G, t]    for t <= position of i

where row b's queries i are its last query_start[b + 1] - query_start[b] tokens, whose keys and values are
in the cache already; G = Hq / Hkv; softcap, window and sinks as in `paged_decode`.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed_rl_kernels.checks import check_lens, check_options, check_paged, misfit, shapes

QUERY_BLOCK = 512
"""Queries with a past, or a window, are taken this many at a time: their mask is [QUERY_BLOCK, context]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A shape to test and to time."""

    name: str
    queries: tuple[int, ...]
    lens: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    value_dim: int | None = None
    page_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


CASES = (
    Case(name="whole prompts", queries=(1, 16, 37), lens=(1, 16, 37)),
    Case(name="chunks", queries=(5, 16, 1), lens=(21, 33, 50)),
    Case(name="no queries", queries=(0, 5, 0), lens=(0, 5, 20)),
    Case(name="smollm2", queries=(160, 20), lens=(160, 180), heads=9, kv_heads=3),
    Case(name="several blocks", queries=(600, 600), lens=(600, 650), heads=2, kv_heads=1),
    Case(name="multi-head", queries=(20, 7), lens=(20, 33), heads=3, kv_heads=3, dim=80),
    Case(name="multi-query", queries=(20, 7), lens=(20, 33), heads=7, kv_heads=1, dim=96),
    Case(name="group 6", queries=(20, 7), lens=(20, 33), heads=12, kv_heads=2),
    Case(name="values of another dim", queries=(20, 7), lens=(20, 33), dim=192, value_dim=128),
    Case(name="page 1", queries=(9, 3), lens=(9, 30), page_size=1),
    Case(name="window", queries=(15, 16, 17, 40), lens=(15, 16, 30, 100), window=16),
    Case(name="window 1", queries=(15, 3), lens=(15, 30), window=1),
    Case(name="window over blocks", queries=(1100,), lens=(1200,), heads=2, kv_heads=1, window=100),
    Case(name="softcap", queries=(20, 7), lens=(20, 33), softcap=5.0),
    Case(name="sinks", queries=(20, 7), lens=(20, 33), sinks=True),
    Case(name="sinks, window, softcap", queries=(20, 7), lens=(20, 33), sinks=True, window=9, softcap=5.0),
)


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend causally from the last tokens of each row.

    Args:
        q: [T, Hq, D], row after row; Hq a multiple of Hkv.
        k_cache: [P, Hkv, S, D], of q's dtype. Slots that no row's context covers may hold anything, NaN too.
        v_cache: [P, Hkv, S, Dv].
        page_table: [B, n] int32 page ids; entries behind the context are never read.
        query_start: [B + 1] int32, where each row's queries start in q; the first 0, the last T.
        seq_lens: [B] int32 context lengths, the queries included.
        scale: factor on the scores; None: D ** -0.5.
        window: a query sees itself and the ``window - 1`` tokens before it.
        softcap: bound of the scores.
        sinks: [Hq] sink logits.

    Returns:
        [T, Hq, Dv] of q's dtype; scores, probabilities and sums are float32.

    Raises:
        ValueError: shapes, dtypes or lengths don't fit.
    """
    check_paged(q, k_cache, v_cache, page_table, seq_lens)
    check_options(window, softcap, sinks, q.shape[1])
    plan = plan_prefill(k_cache, page_table, query_start, seq_lens)
    return prefill_with(plan, q, k_cache, v_cache, scale=scale, window=window, softcap=softcap, sinks=sinks)


def reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`paged_prefill` row by row with whole score matrices, in float32 (float64 for float64 inputs)."""
    group, size = q.shape[1] // k_cache.shape[1], k_cache.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:2], v_cache.shape[3])
    starts = query_start.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        queries = slice(starts[row], starts[row + 1])
        pages = page_table[row, : -(-length // size)].long()
        k = k_cache[pages].transpose(1, 2).flatten(0, 1)[:length].to(wide).repeat_interleave(group, 1)
        v = v_cache[pages].transpose(1, 2).flatten(0, 1)[:length].to(wide).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,thd->hqt", q[queries].to(wide), k)
        scores = scores * (q.shape[2] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(length, device=q.device)
        at = position[length - (queries.stop - queries.start) :].unsqueeze(1)
        seen = (position <= at) & (position > at - (length if window is None else window))
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(wide)[:, None, None].expand(-1, scores.shape[1], 1)), 2)
        out[queries] = torch.einsum("hqt,thd->qhd", scores.softmax(2)[..., :length], v).to(q.dtype)
    return out


@dataclass(slots=True)
class PrefillRow:
    """One row with queries."""

    start: int
    stop: int
    """Its queries in q."""
    length: int
    pages: Tensor
    """[Hkv, pages] int64, into the cache seen as [P * Hkv, S * D]."""


def plan_prefill(
    k_cache: Tensor, page_table: Tensor, query_start: Tensor, seq_lens: Tensor
) -> list[PrefillRow]:
    """Plan a `paged_prefill` for all layers whose caches have this shape; arguments and errors as there."""
    if query_start.shape != (len(seq_lens) + 1,):
        got = shapes(query_start=query_start, seq_lens=seq_lens)
        raise misfit("query_start misshapen", got, "pass query_start [B + 1]")
    starts, lens, (_, kv_heads, size, _) = query_start.tolist(), seq_lens.tolist(), k_cache.shape
    counts = [stop - start for start, stop in pairwise(starts)]
    if starts[0] != 0 or min(counts, default=0) < 0:
        raise misfit("query_start must rise from 0", starts, "pass the running sum of the rows' query counts")
    check_lens(lens, counts, size, page_table.shape[1])
    heads = torch.arange(kv_heads, device=page_table.device).unsqueeze(1)
    head_pages = page_table.long().unsqueeze(1) * kv_heads + heads  # [B, Hkv, n]
    return [
        PrefillRow(starts[b], starts[b + 1], lens[b], head_pages[b, :, : -(-lens[b] // size)])
        for b, count in enumerate(counts)
        if count
    ]


def prefill_with(
    plan: list[PrefillRow],
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`paged_prefill` as planned before: lengths, pages and query counts are the plan's."""
    (tokens, heads, dim), (_, kv_heads, size, _), value_dim = q.shape, k_cache.shape, v_cache.shape[3]
    if tokens != (plan[-1].stop if plan else 0):
        raise misfit("query_start misses the end of q", shapes(q=q), "pass query_start[-1] queries")
    wide = torch.promote_types(q.dtype, torch.float32)
    scale = dim**-0.5 if scale is None else scale
    query = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [Hkv, group, T, D]
    out = q.new_empty(tokens, heads, value_dim)
    for row in plan:
        count = row.stop - row.start
        skipped = 0 if window is None else max(0, row.length - count - window + 1) // size
        past = row.length - count - skipped * size  # of the tokens copied
        pages = row.pages[:, skipped:]
        k = k_cache.view(-1, size * dim)[pages].view(kv_heads, -1, dim)
        v = v_cache.view(-1, size * value_dim)[pages].view(kv_heads, -1, value_dim)
        step = QUERY_BLOCK if past or window is not None else count
        for begin in range(0, count, step):
            end = min(begin + step, count)
            first = 0 if window is None else max(0, past + begin - window + 1)
            block = _attend(
                query[:, :, row.start + begin : row.start + end].to(wide),
                k[:, first : past + end].to(wide),
                v[:, first : past + end].to(wide),
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
            )
            out[row.start + begin : row.start + end] = block.permute(2, 0, 1, 3).flatten(1, 2)
    return out


def _attend(
    query: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Queries [Hkv, group, q, D], the last of the tokens of k [Hkv, t, D] and v -> [Hkv, group, q, Dv]."""
    kv_heads, group, count, _ = query.shape
    k, v = k.unsqueeze(1).expand(-1, group, -1, -1), v.unsqueeze(1).expand(-1, group, -1, -1)
    mask = None
    if k.shape[2] != count or window is not None:
        mask = _mask(query, k.shape[2], window)
    if softcap is None and sinks is None and k.shape[3] == v.shape[3]:
        return F.scaled_dot_product_attention(query, k, v, mask, is_causal=mask is None, scale=scale)
    scores = query @ k.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + (_mask(query, k.shape[2], window) if mask is None else mask)
    if sinks is not None:
        sink = sinks.to(scores).view(kv_heads, group, 1, 1).expand(-1, -1, count, 1)
        return torch.cat((scores, sink), 3).softmax(3)[..., :-1] @ v
    return scores.softmax(3) @ v


def _mask(query: Tensor, length: int, window: int | None) -> Tensor:
    """[q, length]: 0 where a query sees a token, -inf elsewhere."""
    count = query.shape[2]
    seen = query.new_ones(count, length, dtype=torch.bool).tril(length - count)
    if window is not None:
        seen = seen.triu(length - count - window + 1)
    return query.new_zeros(count, length).masked_fill_(~seen, -torch.inf)
