"""Attention by Triton kernels: lengths and pages stay on the device, and one worklist serves all layers."""

from collections.abc import Collection

import torch
from torch import Tensor

from tokenspeed_rl.layers.forward_batch import ForwardBatch
from tokenspeed_rl_kernels import paged_prefill
from tokenspeed_rl_kernels.attention_options import AttentionOptions
from tokenspeed_rl_kernels.step_decode import StepDecode


class TritonAttention:
    """The backend ``triton``, for a model of ``heads`` query heads."""

    def __init__(self, heads: int) -> None:
        self.heads = heads

    def plan(
        self, batch: ForwardBatch, k_cache: Tensor, v_cache: Tensor, windows: Collection[int | None]
    ) -> "TritonPlan":
        """See `AttentionBackend`. What the batch brings along for its decode rows is used as it is."""
        decode = batch.decode
        if decode is None and batch.num_decode:
            rows = batch.decode_pages, batch.decode_lens, batch.shared
            decode = StepDecode.of(*rows, self.heads, (k_cache, v_cache))
        return TritonPlan(batch, decode)


class TritonPlan:
    """One step."""

    def __init__(self, batch: ForwardBatch, decode: StepDecode | None) -> None:
        self._batch = batch
        self._decode = decode

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None) -> Tensor:
        """See `AttentionPlan`."""
        batch, rows, parts = self._batch, self._batch.num_decode, []
        if self._decode is not None:
            options = AttentionOptions(window=window)
            parts.append(self._decode.attend(q[:rows], k_cache, v_cache, options))
        if rows < len(q):
            chunks = batch.prefill_pages, batch.prefill_starts, batch.prefill_lens
            parts.append(paged_prefill(q[rows:], k_cache, v_cache, *chunks, window=window))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
