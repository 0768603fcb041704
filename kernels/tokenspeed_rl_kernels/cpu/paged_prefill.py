"""`paged_prefill` in plain torch: row by row, a block of queries at a time."""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed_rl_kernels.attention_options import AttentionOptions
from tokenspeed_rl_kernels.checks import check_lens, misfit, shapes

QUERY_BLOCK = 512
"""Queries with a past, or a window, are taken this many at a time: their mask is [QUERY_BLOCK, context]."""


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
    plan: list[PrefillRow], q: Tensor, k_cache: Tensor, v_cache: Tensor, options: AttentionOptions
) -> Tensor:
    """`paged_prefill` as planned before: lengths, pages and query counts are the plan's."""
    (tokens, heads, dim), (_, kv_heads, size, _), value_dim = q.shape, k_cache.shape, v_cache.shape[3]
    if tokens != (plan[-1].stop if plan else 0):
        raise misfit("query_start misses the end of q", shapes(q=q), "pass query_start[-1] queries")
    wide = torch.promote_types(q.dtype, torch.float32)
    window = options.window
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
                options,
            )
            out[row.start + begin : row.start + end] = block.permute(2, 0, 1, 3).flatten(1, 2)
    return out


def _attend(query: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """Queries [Hkv, group, q, D], the last of the tokens of k [Hkv, t, D] and v -> [Hkv, group, q, Dv]."""
    kv_heads, group, count, dim = query.shape
    scale, window, softcap, sinks = options.scale_for(dim), options.window, options.softcap, options.sinks
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
