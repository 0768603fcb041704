"""Attention of a decoder layer, over the paged cache, for decode rows and prefill chunks of one step."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tokenspeed_rl.layers.forward_batch import ForwardBatch
from tokenspeed_rl_kernels import rope_write_kv


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """RMS norms of each query and key head, before the rotation."""

    query: Tensor
    """[head_dim]."""
    key: Tensor
    """[head_dim]."""
    eps: float


class AttentionPlan(Protocol):
    """What all layers of one step have in common. Made anew for each step."""

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None) -> Tensor:
        """Queries [T, Hq, D] of the step's tokens, whose keys and values a layer's caches hold by now ->
        [T, Hq, D]."""


class AttentionBackend(Protocol):
    """A way to attend, for one model. Used by one thread."""

    def plan(
        self, batch: ForwardBatch, k_cache: Tensor, v_cache: Tensor, windows: Collection[int | None]
    ) -> AttentionPlan:
        """Plan a step for layers with caches of this shape and these windows."""


def attention(
    qkv: Tensor,
    batch: ForwardBatch,
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
        batch: the step's.
        plan: made of it.
        k_cache: [P, Hkv, S, D], this layer's; written at the batch's slots.
        v_cache: [P, Hkv, S, D].
        cos_sin: [L, D] float32, see `RopeTable`.
        norms: of heads, if the model has them.
        window: this layer's sliding window.

    Returns:
        [T, Hq * D].
    """
    _, kv_heads, _, dim = k_cache.shape
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
    return plan.attend(q, k_cache, v_cache, window).flatten(1)
