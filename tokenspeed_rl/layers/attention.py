"""Attention of a decoder layer, over the paged cache, for decode rows and prefill chunks of one step."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed_rl.layers.forward_batch import ForwardBatch
from tokenspeed_rl_kernels import rope_write_kv
from tokenspeed_rl_kernels.attention_options import AttentionOptions
from tokenspeed_rl_kernels.cpu.paged_decode import DecodePlan, decode_with, plan_decode
from tokenspeed_rl_kernels.cpu.paged_prefill import PrefillRow, plan_prefill, prefill_with


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """RMS norms of each query and key head, before the rotation."""

    query: Tensor
    """[head_dim]."""
    key: Tensor
    """[head_dim]."""
    eps: float


class AttentionPlan:
    """What all layers of one step have in common. Made anew for each step."""

    def __init__(
        self, batch: ForwardBatch, k_cache: Tensor, v_cache: Tensor, windows: Iterable[int | None]
    ) -> None:
        self.batch = batch
        self.decode: dict[int | None, DecodePlan] = {}
        if batch.num_decode:
            rows = batch.decode_pages, batch.decode_lens
            self.decode = {
                window: plan_decode(k_cache, v_cache, *rows, window=window, shared=batch.shared)
                for window in windows
            }
        self.prefill: list[PrefillRow] = []
        if len(batch.prefill_lens):
            self.prefill = plan_prefill(
                k_cache, batch.prefill_pages, batch.prefill_starts, batch.prefill_lens
            )


def attention(
    qkv: Tensor,
    plan: AttentionPlan,
    k_cache: Tensor,
    v_cache: Tensor,
    cos_sin: Tensor,
    *,
    norms: HeadNorms | None,
    window: int | None,
) -> Tensor:
    """Rotate, write the step's keys and values, attend.

    Args:
        qkv: [T, (Hq + 2 Hkv) * D]: queries, keys, values of each token.
        plan: of the step.
        k_cache: [P, Hkv, S, D], this layer's; written at the batch's slots.
        v_cache: [P, Hkv, S, D].
        cos_sin: [L, D] float32, see `RopeTable`.
        norms: of heads, if the model has them.
        window: this layer's sliding window.

    Returns:
        [T, Hq * D].
    """
    batch, (_, kv_heads, _, dim) = plan.batch, k_cache.shape
    q, k, v = qkv.view(len(qkv), -1, dim).split((qkv.shape[1] // dim - 2 * kv_heads, kv_heads, kv_heads), 1)
    q = rope_write_kv(
        q,
        k,
        v,
        batch.positions,
        cos_sin,
        k_cache,
        v_cache,
        batch.slots,
        q_norm=None if norms is None else norms.query,
        k_norm=None if norms is None else norms.key,
        eps=0.0 if norms is None else norms.eps,
    )
    rows, options = batch.num_decode, AttentionOptions(window=window)
    parts = []
    if rows:
        parts.append(decode_with(plan.decode[window], q[:rows], k_cache, v_cache, options))
    if rows < len(q):
        parts.append(prefill_with(plan.prefill, q[rows:], k_cache, v_cache, options))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)
