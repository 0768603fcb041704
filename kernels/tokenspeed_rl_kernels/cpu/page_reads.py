"""Attention over paged keys and values in plain torch: some rows' pages are copied together, then multiplied.

Copying in pieces of the size of the L2 cache is what counts: 64 contexts copied at once take twice as long.
Which pages go together depends on lengths and the page table alone: it is planned once and serves all
layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SCRATCH_BYTES = 4 << 20
"""Bytes of keys and values copied at a time. Measured best of 0.5 MiB .. unbounded, on one thread and two."""


@dataclass(slots=True)
class Chunk:
    """Consecutive rows whose keys and values are copied together."""

    start: int
    stop: int
    length: int
    """Tokens read per row, the longest row's."""
    pages: Tensor
    """[rows * Hkv * pages] int64, into the cache seen as [P * Hkv, S * D]."""
    tokens: Tensor | None
    """[rows * Hkv * length] int64, into the cache seen as [P * Hkv * S, Dv]; None where all tokens count. One
    that doesn't points at one that does: a probability of 0 doesn't silence a NaN in its slot."""
    dead: Tensor | None
    """[rows, 1, length] bool: tokens that don't count."""


@dataclass(slots=True)
class Reads:
    """A plan to read a span of tokens per row."""

    chunks: list[Chunk]
    empty: Tensor | None
    """[rows] bool: rows with nothing to read; None if there are none."""


class Scratch:
    """Memory for the copies, kept from chunk to chunk and layer to layer."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def copy(self, name: str, cache: Tensor, width: int, index: Tensor) -> Tensor:
        """Rows ``index`` of the cache, seen as [-1, width]."""
        need = index.numel() * width
        held = self._held.get(name)
        if held is None or held.numel() < need:
            held = self._held[name] = cache.new_empty(need)
        return torch.index_select(cache.view(-1, width), 0, index, out=held[:need].view(-1, width))


def plan_reads(
    k_cache: Tensor, v_cache: Tensor, page_table: Tensor, firsts: list[int], lens: list[int]
) -> Reads:
    """Plan to read tokens [firsts[b], lens[b]) of each row b of page_table [B, n]; lengths fit the table."""
    size = k_cache.shape[2]
    page_bytes = k_cache.element_size() * k_cache.shape[1] * size * (k_cache.shape[3] + v_cache.shape[3])
    table = page_table.long()
    spans = list(zip(firsts, lens, strict=True))
    chunks, start, most = [], 0, 0
    for row, (first, length) in enumerate(spans):
        count = -(-length // size) - first // size
        if row > start and max(most, count) * (row + 1 - start) * page_bytes > SCRATCH_BYTES:
            chunks.append(_chunk(k_cache, table[start:row], spans[start:row], start, most))
            start, most = row, 0
        most = max(most, count)
    if spans:
        chunks.append(_chunk(k_cache, table[start:], spans[start:], start, most))
    nothing = [first == length for first, length in spans]
    return Reads(chunks, torch.tensor(nothing, device=k_cache.device) if any(nothing) else None)


def _chunk(k_cache: Tensor, table: Tensor, spans: list[tuple[int, int]], start: int, columns: int) -> Chunk:
    """Indices of ``columns`` pages per row, from the page that holds the row's first token."""
    kv_heads, size, device = k_cache.shape[1], k_cache.shape[2], k_cache.device
    origins = [first // size for first, _ in spans]
    within = [(f - o * size, n - o * size) for (f, n), o in zip(spans, origins, strict=True)]
    length = max(last for _, last in within) if columns else 0
    origin = torch.tensor(origins, device=device).unsqueeze(1)
    first, last = torch.tensor(within, device=device).unsqueeze(2).unbind(1)  # [rows, 1] each
    column = torch.arange(columns, device=device)
    pages = table.gather(1, (origin + column).clamp_(max=max(table.shape[1] - 1, 0)))
    # What stands behind the context in the table may be no page at all; page 0 exists.
    pages = pages.masked_fill_(column * size >= last, 0)
    head_pages = pages.unsqueeze(1) * kv_heads + torch.arange(kv_heads, device=device).unsqueeze(1)
    stop = start + len(spans)
    if all(span == (0, length) for span in within) or not columns:
        return Chunk(start, stop, length, head_pages.flatten(), None, None)
    token = torch.arange(length, device=device)
    dead = ((token < first) | (token >= last)).unsqueeze(1)  # [rows, 1, length]
    tokens = (head_pages.unsqueeze(3) * size + torch.arange(size, device=device)).flatten(2)[..., :length]
    stand_in = tokens.gather(2, first.clamp(max=length - 1).unsqueeze(1).expand(-1, kv_heads, 1))
    tokens = torch.where(dead, stand_in, tokens)
    return Chunk(start, stop, length, head_pages.flatten(), tokens.flatten(), dead)


def attend(
    reads: Reads,
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scratch: Scratch,
    *,
    softcap: float | None,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Attend from M queries per row and head to all that the row reads.

    Args:
        reads: the plan, of B rows.
        query: [B * Hkv, M, D], scaled, float32.
        k_cache: [P, Hkv, S, D].
        v_cache: [P, Hkv, S, Dv].
        scratch: memory for the copies.
        softcap: bound of the scores.
        with_lse: whether the second result is wanted.

    Returns:
        [B * Hkv, M, Dv], and the log-sum-exp of the scores [B * Hkv, M], or an empty tensor. Empty rows
        have 0 and -inf.
    """
    kv_heads, size, dim, value_dim = *k_cache.shape[1:], v_cache.shape[3]
    out = query.new_empty(*query.shape[:2], value_dim)
    lse = query.new_empty(query.shape[:2] if with_lse else 0)
    for chunk in reads.chunks:
        if not chunk.length:
            continue
        batch = (chunk.stop - chunk.start) * kv_heads
        rows = slice(chunk.start * kv_heads, chunk.stop * kv_heads)
        k = scratch.copy("k", k_cache, size * dim, chunk.pages).view(batch, -1, dim)[:, : chunk.length]
        if chunk.tokens is None:
            v = scratch.copy("v", v_cache, size * value_dim, chunk.pages)
        else:
            v = scratch.copy("v", v_cache, value_dim, chunk.tokens)
        v = v.view(batch, -1, value_dim)[:, : chunk.length]
        scores = torch.bmm(query[rows], k.to(query.dtype).transpose(1, 2))
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        if chunk.dead is not None:
            scores.view(chunk.stop - chunk.start, -1, chunk.length).masked_fill_(chunk.dead, -torch.inf)
        weights = scores.softmax(-1)
        if (
            with_lse
        ):  # the largest weight is 1 / sum(exp(score - largest score)): no second pass of exponentials
            lse[rows] = scores.amax(-1) - weights.amax(-1).log_()
        torch.bmm(weights, v.to(query.dtype), out=out[rows])
    if reads.empty is not None:
        out.view(len(reads.empty), -1)[reads.empty] = 0.0
        if with_lse:
            lse.view(len(reads.empty), -1)[reads.empty] = -torch.inf
    return out, lse
