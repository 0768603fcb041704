"""`paged_decode` by Triton for all layers of a step: work and scratch are made once, and may be kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from tokenspeed_rl_kernels.attention_options import AttentionOptions, Shared
from tokenspeed_rl_kernels.decode_work import DecodeWork, Sharing, max_splits

if TYPE_CHECKING:
    from tokenspeed_rl_kernels.gpu.attention_shape import AttentionShape
    from tokenspeed_rl_kernels.gpu.paged_decode import DecodeScratch

Caches = tuple[Tensor, Tensor]
"""A layer's keys [P, Hkv, S, D] and values [P, Hkv, S, Dv]; those of all layers have one shape."""


@dataclass(frozen=True, slots=True)
class StepDecode:
    """Rows of a step, and what its layers have in common."""

    page_table: Tensor
    """[B, n] int32."""
    seq_lens: Tensor
    """[B] int32."""
    work: DecodeWork
    scratch: DecodeScratch

    @classmethod
    def of(
        cls, page_table: Tensor, seq_lens: Tensor, shared: Shared | None, heads: int, caches: Caches
    ) -> StepDecode:
        """For these rows as they are now, of ``heads`` query heads; the rest as `paged_decode` takes it."""
        from tokenspeed_rl_kernels.gpu import paged_decode as gpu

        shape = _shape(heads, caches)
        work = gpu.work_for(page_table, seq_lens, shared, shape)
        return cls(page_table, seq_lens, work, gpu.scratch_for(page_table, shape))

    @classmethod
    def empty(
        cls, page_table: Tensor, seq_lens: Tensor, sharing: Sharing, heads: int, caches: Caches
    ) -> StepDecode:
        """For whatever these tensors hold once `step_metadata` has written ``work``."""
        from tokenspeed_rl_kernels.gpu import paged_decode as gpu

        shape = _shape(heads, caches)
        work = DecodeWork.empty(sharing, max_splits(page_table.shape[1], shape.page_size))
        return cls(page_table, seq_lens, work, gpu.scratch_for(page_table, shape))

    def first(self, rows: int) -> StepDecode:
        """The first so many rows of it, in the same memory."""
        work, scratch = self.work, self.scratch
        return StepDecode(
            self.page_table[:rows],
            self.seq_lens[:rows],
            work._replace(sharing=Sharing(*(column[:rows] for column in work.sharing))),
            type(scratch)(*(part[:rows] for part in scratch)),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of work and scratch."""
        return sum(part.nbytes for part in (self.work.items, self.work.num_items, *self.scratch))

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, options: AttentionOptions) -> Tensor:
        """`paged_decode` of q [B, Hq, D] over a layer's caches."""
        from tokenspeed_rl_kernels.gpu import paged_decode as gpu

        rows = self.page_table, self.seq_lens
        return gpu.decode_with(q, k_cache, v_cache, *rows, self.work, self.scratch, options)


def rows_per_read(heads: int, caches: Caches) -> int:
    """How many rows at most read a shared prefix together."""
    return _shape(heads, caches).tile_tokens


def _shape(heads: int, caches: Caches) -> AttentionShape:
    from tokenspeed_rl_kernels.gpu.attention_shape import AttentionShape

    k_cache, v_cache = caches
    return AttentionShape(
        heads=heads,
        kv_heads=k_cache.shape[1],
        dim=k_cache.shape[3],
        value_dim=v_cache.shape[3],
        page_size=k_cache.shape[2],
        dtype=k_cache.dtype,
    )
