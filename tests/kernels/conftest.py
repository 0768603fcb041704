"""Paged caches with poison wherever nobody may read, and dense float64 attention to compare with."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

BAD_PAGE = 2**31 - 1


@dataclass
class PagedCase:
    """Inputs of a paged attention, dense and paged."""

    keys: list[Tensor]
    """[t, Hkv, D] per row."""
    values: list[Tensor]
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor
    lens: Tensor
    shared: tuple[Tensor, Tensor, Tensor] | None
    options: dict[str, Any]


def build(case: Any, queries: int, dtype: torch.dtype = torch.float32) -> PagedCase:
    """Random contexts in shuffled pages; unused slots are NaN, table tails name no page."""
    generator = torch.Generator().manual_seed(len(case.name))
    dims = case.dim, case.value_dim or case.dim

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    prefixes = getattr(case, "prefix", ())
    group_of_row = [row % (len(prefixes) + 1) for row in range(len(case.lens))]
    group_of_row = [
        g if g < len(prefixes) and prefixes[g] <= n else -1
        for g, n in zip(group_of_row, case.lens, strict=True)
    ]
    size = case.page_size
    order = torch.randperm(
        sum(-(-n // size) + 1 for n in (*case.lens, *prefixes)), generator=generator
    ).tolist()
    caches = [torch.full((len(order), case.kv_heads, size, dim), torch.nan, dtype=dtype) for dim in dims]

    def fill(length: int, dense: list[Tensor], pages: list[int]) -> None:
        for start in range(0, length, size):
            if start // size == len(pages):
                pages.append(order.pop())
            for cache, rows in zip(caches, dense, strict=True):
                part = rows[start : start + size]
                cache[pages[start // size], :, : len(part)] = part.transpose(0, 1)

    heads = [([random(n, case.kv_heads, dim) for dim in dims], []) for n in prefixes]
    for length, (dense, pages) in zip(prefixes, heads, strict=True):
        fill(length, dense, pages)
    keys, values, tables = [], [], []
    for length, group in zip(case.lens, group_of_row, strict=True):
        head, pages = heads[group] if group >= 0 else ([random(0, case.kv_heads, dim) for dim in dims], [])
        tail = length - len(head[0])
        dense = [torch.cat((h, random(tail, case.kv_heads, dim))) for h, dim in zip(head, dims, strict=True)]
        pages = list(pages)
        fill(length, dense, pages)
        keys.append(dense[0])
        values.append(dense[1])
        tables.append(pages)
    width = max(len(pages) for pages in tables) + 2
    table = torch.tensor([pages + [BAD_PAGE] * (width - len(pages)) for pages in tables], dtype=torch.int32)
    shared = None
    if prefixes:
        longest = max(len(pages) for _, pages in heads) + 1
        listed = [pages + [BAD_PAGE] * (longest - len(pages)) for _, pages in heads]
        shared = (
            torch.tensor(listed, dtype=torch.int32),
            torch.tensor(prefixes, dtype=torch.int32),
            torch.tensor(group_of_row, dtype=torch.int32),
        )
    sinks = torch.randn(case.heads, generator=generator) if case.sinks else None
    return PagedCase(
        keys=keys,
        values=values,
        q=random(queries, case.heads, case.dim),
        k_cache=caches[0],
        v_cache=caches[1],
        table=table,
        lens=torch.tensor(case.lens, dtype=torch.int32),
        shared=shared,
        options={"window": case.window, "softcap": case.softcap, "sinks": sinks},
    )


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Queries [n, Hq, D] of the last n tokens of keys [t, Hkv, D] and values -> [n, Hq, Dv], head by head."""
    (count, heads, dim), group = q.shape, q.shape[1] // keys.shape[1]
    out = torch.zeros(count, heads, values.shape[2], dtype=dtype)
    for i in range(count if len(keys) else 0):
        at = len(keys) - count + i
        first = max(0, at + 1 - (window or at + 1))
        for head in range(heads):
            k = keys[first : at + 1, head // group].to(dtype)
            v = values[first : at + 1, head // group].to(dtype)
            scores = k @ q[i, head].to(dtype) / dim**0.5
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            if sinks is not None:
                scores = torch.cat((scores, sinks[head].to(dtype).view(1)))
            weights = (scores - scores.max()).exp()
            out[i, head] = (weights / weights.sum())[: len(v)] @ v
    return out


def assert_as_exact_as_torch(ours: Tensor, torchs: Tensor, exact: Tensor) -> None:
    """The error against the float64 result is at most 1.5 times that of plain torch in the same dtype."""
    assert not ours.isnan().any()
    slack = 4 * torch.finfo(ours.dtype).eps * float(exact.abs().max()) if exact.numel() else 0.0
    ours_error, torchs_error = (
        float((x.double() - exact).abs().max()) if x.numel() else 0.0 for x in (ours, torchs)
    )
    assert ours_error <= 1.5 * torchs_error + slack


@pytest.fixture
def paged() -> Any:
    """`build`."""
    return build


@pytest.fixture
def dense_attention() -> Any:
    """`attend`."""
    return attend


@pytest.fixture
def check_exact() -> Any:
    """`assert_as_exact_as_torch`."""
    return assert_as_exact_as_torch
