"""Attention of one new query per row over a paged key-value cache.

    out[b, h] = sum_t softmax_t(scale * q[b, h] . k[b, h // G, t]) v[b, h // G, t]    for t < seq_lens[b]

with G = Hq / Hkv and, in this order, ``softcap``: s -> softcap * tanh(s / softcap); ``window``: only the last
``window`` tokens; ``sinks``: one more logit per head that takes probability and gives no value (gpt-oss).

A prefix that rows share is read once for all of them; on a GPU, for as many as fill a tile, in whole splits
of 256 tokens, which changes no bit of the result.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed_rl_kernels.attention_options import AttentionOptions, Shared
from tokenspeed_rl_kernels.checks import check_options, check_paged, check_shared, misfit, shapes
from tokenspeed_rl_kernels.cpu.paged_decode import decode_with, plan_decode
from tokenspeed_rl_kernels.registry import op, runs_triton


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A shape to test."""

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


def _fake(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    prefix_pages: Tensor | None,
    prefix_lens: Tensor | None,
    group_of_row: Tensor | None,
) -> Tensor:
    return q.new_empty(*q.shape[:2], v_cache.shape[3])


@op(_fake)
def _paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    prefix_pages: Tensor | None,
    prefix_lens: Tensor | None,
    group_of_row: Tensor | None,
) -> Tensor:
    check_paged(q, k_cache, v_cache, page_table, seq_lens)
    options = AttentionOptions(scale=scale, window=window, softcap=softcap, sinks=sinks)
    check_options(options, q.shape[1])
    if len(q) != len(seq_lens):
        raise misfit("rows misfit", shapes(q=q, seq_lens=seq_lens), "pass one query per row")
    shared = None
    if prefix_pages is not None and prefix_lens is not None and group_of_row is not None:
        shared = prefix_pages, prefix_lens, group_of_row
        check_shared(shared, len(q))
    if runs_triton(q):
        from tokenspeed_rl_kernels.gpu import paged_decode as gpu

        return gpu.launch(q, k_cache, v_cache, page_table, seq_lens, shared, options)
    plan = plan_decode(k_cache, v_cache, page_table, seq_lens, window=window, shared=shared)
    return decode_with(plan, q, k_cache, v_cache, options)


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
            same: the result is that of ``shared=None``. On a GPU these pages are found in ``page_table``.

    Returns:
        [B, Hq, Dv] of q's dtype; scores, probabilities and sums are float32.

    Raises:
        ValueError: shapes or dtypes don't fit; on a CPU also: lengths or groups don't. A GPU would have to be
            waited for to know them: they are trusted there.
    """
    prefix_pages, prefix_lens, group_of_row = shared or (None, None, None)
    return _paged_decode(
        q,
        k_cache,
        v_cache,
        page_table,
        seq_lens,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        prefix_pages=prefix_pages,
        prefix_lens=prefix_lens,
        group_of_row=group_of_row,
    )


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
