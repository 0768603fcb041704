"""The one way in which a kernel refuses its arguments."""

from math import inf

import torch
from torch import Tensor

from tokenspeed_rl_kernels.attention_options import AttentionOptions, Shared


def misfit(what: str, got: object, fix: str) -> ValueError:
    """The error for a misfit argument: what is wrong, what was given, what to do."""
    return ValueError(f"{what}: got {got}; {fix}")


def shapes(**tensors: Tensor) -> str:
    """Names and shapes, for a message."""
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())


def check_caches(k_cache: Tensor, v_cache: Tensor) -> None:
    """Check a layer's caches: k_cache [P, Hkv, S, D] and v_cache [P, Hkv, S, Dv], contiguous.

    Raises:
        ValueError: they aren't.
    """
    if k_cache.ndim != 4 or v_cache.ndim != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        fix = "pass k_cache [P, Hkv, S, D] and v_cache [P, Hkv, S, Dv]"
        raise misfit("caches misshapen", shapes(k_cache=k_cache, v_cache=v_cache), fix)
    if not k_cache.is_contiguous() or not v_cache.is_contiguous():
        raise misfit("caches aren't contiguous", (k_cache.stride(), v_cache.stride()), "pass whole caches")


def check_paged(q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, seq_lens: Tensor) -> None:
    """Check what paged attention takes: q [T, Hq, D], a layer's caches, page_table [B, n], seq_lens [B].

    Raises:
        ValueError: a shape or dtype doesn't fit.
    """
    check_caches(k_cache, v_cache)
    if q.ndim != 3 or q.shape[2] != k_cache.shape[3] or q.shape[1] % k_cache.shape[1]:
        fix = "pass q [T, Hq, D] with the cache's D, and Hq a multiple of its Hkv"
        raise misfit("queries don't fit the cache", shapes(q=q, k_cache=k_cache), fix)
    if q.dtype != k_cache.dtype or q.dtype != v_cache.dtype:
        raise misfit("dtypes differ", (q.dtype, k_cache.dtype, v_cache.dtype), "use one dtype")
    if page_table.ndim != 2 or seq_lens.shape != page_table.shape[:1]:
        fix = "pass page_table [B, n] and seq_lens [B]"
        raise misfit("page table misfits", shapes(page_table=page_table, seq_lens=seq_lens), fix)
    for name, index in (("page_table", page_table), ("seq_lens", seq_lens)):
        if index.dtype not in (torch.int32, torch.int64):
            raise misfit(f"{name} has the wrong dtype", index.dtype, "pass int32")


def check_shared(shared: Shared, batch: int) -> None:
    """Check the shapes of groups of rows that share prefixes.

    Raises:
        ValueError: they don't fit each other or the batch.
    """
    pages, prefix_lens, group_of_row = shared
    if pages.ndim != 2 or prefix_lens.shape != pages.shape[:1] or group_of_row.shape != (batch,):
        got = shapes(prefix_pages=pages, prefix_lens=prefix_lens, group_of_row=group_of_row)
        raise misfit("shared misshapen", got, "pass prefix_pages [G, m], prefix_lens [G], group_of_row [B]")


def check_lens(lens: list[int], least: list[int], page_size: int, columns: int) -> None:
    """Check context lengths against the least that a row must have and the most that its pages hold.

    Raises:
        ValueError: a length is out of range.
    """
    for row, (length, low) in enumerate(zip(lens, least, strict=True)):
        if not low <= length <= columns * page_size:
            fix = f"keep it within {low} .. {columns * page_size} ({columns} pages of {page_size})"
            raise misfit(f"context length of row {row} out of range", length, fix)


def check_options(options: AttentionOptions, heads: int) -> None:
    """Check the options of paged attention.

    Raises:
        ValueError: the window or softcap isn't positive, or the sinks aren't one per query head.
    """
    window, softcap, sinks = options.window, options.softcap, options.sinks
    if window is not None and window < 1:
        raise misfit("window must be positive", window, "pass None for no window")
    if softcap is not None and not 0 < softcap < inf:
        raise misfit("softcap must be positive", softcap, "pass None for no softcap")
    if sinks is not None and sinks.shape != (heads,):
        raise misfit("sinks misshapen", list(sinks.shape), f"pass one logit per query head, [{heads}]")
