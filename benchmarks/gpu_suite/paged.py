"""Contexts in a paged cache, and dense attention over the same."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NO_PAGE = 2**31 - 1
"""In every table behind the context: who reads it, dies."""


@dataclass(slots=True, kw_only=True)
class Contexts:
    """Rows of a batch, dense and paged; slots that hold nothing are NaN."""

    keys: list[Tensor]
    """[t, Hkv, D] of each row."""
    values: list[Tensor]
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor
    lens: Tensor
    shared: tuple[Tensor, Tensor, Tensor] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def paged(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What paged ops take behind the queries."""
        return self.k_cache, self.v_cache, self.table, self.lens


def contexts(
    lens: list[int],
    *,
    kv_heads: int,
    dim: int,
    device: torch.device,
    prefix: int = 0,
    size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Contexts:
    """Random contexts in shuffled pages; all rows longer than `prefix`, whole pages, begin with one of that
    length."""
    generator = torch.Generator(device).manual_seed(seed)
    head = prefix // size
    counts = [-(-n // size) - (head if n > prefix else 0) for n in lens]
    order = torch.randperm(sum(counts) + head, device=device, generator=generator)
    first, *own = order.split([head, *counts])
    shape = (len(order), kv_heads, size, dim)
    caches = [torch.randn(shape, device=device, generator=generator).to(dtype) for _ in range(2)]
    table = torch.full((len(lens), max(-(-n // size) for n in lens) + 1), NO_PAGE, device=device)
    pages = [torch.cat((first, p)) if n > prefix else p for n, p in zip(lens, own, strict=True)]
    dense: list[list[Tensor]] = [[], []]
    for row, (length, its) in enumerate(zip(lens, pages, strict=True)):
        table[row, : len(its)] = its
        for cache, kept in zip(caches, dense, strict=True):
            kept.append(cache[its].transpose(1, 2).flatten(0, 1)[:length].clone())
            if length % size:
                cache[its[-1], :, length % size :] = torch.nan
    group = torch.tensor([0 if n > prefix else -1 for n in lens], dtype=torch.int32, device=device)
    shared = (
        first.int().unsqueeze(0),
        torch.tensor([prefix], dtype=torch.int32, device=device),
        group,
    )
    return Contexts(
        keys=dense[0],
        values=dense[1],
        k_cache=caches[0],
        v_cache=caches[1],
        table=table.int(),
        lens=torch.tensor(lens, dtype=torch.int32, device=device),
        shared=shared if prefix else None,
    )


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Queries [n, Hq, D] of the last n tokens of keys and values [t, Hkv, D] -> [n, Hq, D].

    In the dtype of q, as transformers' eager attention has it: the softmax alone in float32, if not wider.
    """
    count, total = len(q), len(keys)
    if not total:
        return torch.zeros_like(q)
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,thd->hqt", q, keys) * q.shape[2] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(total, device=q.device)
    at = place[total - count :].unsqueeze(1)
    seen = (place <= at) & (place > at - (window or total))
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(q.dtype)[:, None, None].expand(-1, count, 1)), 2)
    wide = torch.promote_types(q.dtype, torch.float32)
    weights = scores.softmax(2, dtype=wide).to(q.dtype)[..., :total]
    return torch.einsum("hqt,thd->qhd", weights, values)
