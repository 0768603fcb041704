"""Causal attention of each row's last tokens over a paged key-value cache: a prompt, or a chunk of one.

    out[i, h] = sum_t softmax_t(scale * q[i, h] . k[b, h // G, t]) v[b, h // G, t]    for t <= position of i

where row b's queries i are its last query_start[b + 1] - query_start[b] tokens, whose keys and values are
in the cache already; G = Hq / Hkv; softcap, window and sinks as in `paged_decode`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed_rl_kernels.attention_options import AttentionOptions
from tokenspeed_rl_kernels.checks import check_options, check_paged, misfit, shapes
from tokenspeed_rl_kernels.cpu.paged_prefill import plan_prefill, prefill_with
from tokenspeed_rl_kernels.registry import op, runs_triton


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A shape to test."""

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


def _fake(
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
    return q.new_empty(*q.shape[:2], v_cache.shape[3])


@op(_fake)
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
        ValueError: shapes or dtypes don't fit; on a CPU also: lengths or starts don't. A GPU would have to be
            waited for to know them: they are trusted there.
    """
    check_paged(q, k_cache, v_cache, page_table, seq_lens)
    options = AttentionOptions(scale=scale, window=window, softcap=softcap, sinks=sinks)
    check_options(options, q.shape[1])
    if query_start.shape != (len(seq_lens) + 1,):
        got = shapes(query_start=query_start, seq_lens=seq_lens)
        raise misfit("query_start misshapen", got, "pass query_start [B + 1]")
    if len(q) and not len(seq_lens):
        raise misfit("query_start misses the end of q", shapes(q=q), "pass query_start[-1] queries")
    if runs_triton(q):
        from tokenspeed_rl_kernels.gpu import paged_prefill as gpu

        return gpu.launch(q, k_cache, v_cache, page_table, query_start, seq_lens, options)
    plan = plan_prefill(k_cache, page_table, query_start, seq_lens)
    return prefill_with(plan, q, k_cache, v_cache, options)


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
