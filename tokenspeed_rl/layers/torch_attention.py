"""Attention in plain torch: what depends on lengths and pages is worked out once for all layers of a step."""

from collections.abc import Collection

import torch
from torch import Tensor

from tokenspeed_rl.layers.forward_batch import ForwardBatch
from tokenspeed_rl_kernels.attention_options import AttentionOptions
from tokenspeed_rl_kernels.cpu.paged_decode import DecodePlan, decode_with, plan_decode
from tokenspeed_rl_kernels.cpu.paged_prefill import PrefillRow, plan_prefill, prefill_with


class TorchAttention:
    """The backend ``torch``."""

    def plan(
        self, batch: ForwardBatch, k_cache: Tensor, v_cache: Tensor, windows: Collection[int | None]
    ) -> "TorchPlan":
        """See `AttentionBackend`."""
        return TorchPlan(batch, k_cache, v_cache, windows)


class TorchPlan:
    """One step."""

    def __init__(
        self, batch: ForwardBatch, k_cache: Tensor, v_cache: Tensor, windows: Collection[int | None]
    ) -> None:
        self._rows = batch.num_decode
        self._decode: dict[int | None, DecodePlan] = {}
        if batch.num_decode:
            rows = batch.decode_pages, batch.decode_lens
            self._decode = {
                window: plan_decode(k_cache, v_cache, *rows, window=window, shared=batch.shared)
                for window in windows
            }
        self._prefill: list[PrefillRow] = []
        if len(batch.prefill_lens):
            self._prefill = plan_prefill(
                k_cache, batch.prefill_pages, batch.prefill_starts, batch.prefill_lens
            )

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None) -> Tensor:
        """See `AttentionPlan`."""
        rows, options = self._rows, AttentionOptions(window=window)
        parts = []
        if rows:
            parts.append(decode_with(self._decode[window], q[:rows], k_cache, v_cache, options))
        if rows < len(q):
            parts.append(prefill_with(self._prefill, q[rows:], k_cache, v_cache, options))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
