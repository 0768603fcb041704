"""The engine's weights: one tensor per slot, owned by the engine or shared with a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tokenspeed_rl.errors import WeightUpdateError
from tokenspeed_rl.weights.digest import checksum
from tokenspeed_rl.weights.mapping import NameMap, Slot, Target
from tokenspeed_rl.weights.receipt import Receipt
from tokenspeed_rl.weights.version import WeightVersion

ALIGNMENT = 256
"""Bytes: every owned slot starts at a multiple, enough for vector loads on any device."""


class WeightStore:
    """Every slot's tensors, their version, and the Hugging Face names under which they are read and written.

    `weights` is what the decoder reads: slot name -> ``(fused,)``, or the parts in order where they don't lie
    side by side. The dict is one object for life. Owned tensors keep their addresses for life; sharing
    replaces values. Not thread-safe: the loop's owner thread calls.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        version: str = "default",
    ) -> None:
        self.slots = tuple(slots)
        self.names = NameMap(self.slots)
        self.dtype = dtype
        self.device = torch.device(device)
        self.version = WeightVersion(version)
        self.weights: dict[str, tuple[Tensor, ...]] = {}
        self.owned = False

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in the store's dtype, gaps not counted."""
        return sum(part.numel for slot in self.slots for part in slot.parts) * self.dtype.itemsize

    def allocate(self) -> None:
        """Map one region of the engine's own for all slots, fused and aligned; values are undefined."""
        if self.owned:
            return
        places, total = {}, 0
        for slot in self.slots:
            size = sum(part.numel for part in slot.parts) * self.dtype.itemsize
            places[slot.name] = (total, size)
            total += -(-size // ALIGNMENT) * ALIGNMENT
        region = torch.empty(total + ALIGNMENT, dtype=torch.uint8, device=self.device)
        skip = -region.data_ptr() % ALIGNMENT
        for slot in self.slots:
            start, size = places[slot.name]
            raw = region[skip + start : skip + start + size]
            self.weights[slot.name] = (raw.view(self.dtype).view(slot.shape),)
        self.owned = True

    def borrow(self, tensors: Mapping[str, tuple[Tensor, ...]]) -> None:
        """Read every slot from somebody else's tensors from now on; memory of the engine's own is let go."""
        self.weights.update(tensors)
        self.owned = False

    def parts(self, target: Target) -> list[Tensor]:
        """Views of the target's parts, in order, each with its own shape."""
        tensors = self.weights[target.slot.name]
        if len(tensors) == len(target.slot.parts):
            return list(tensors[target.start : target.stop])
        sizes = [part.shape[0] for part in target.slot.parts]
        return list(tensors[0].split(sizes)[target.start : target.stop])

    @torch.no_grad()
    def write(self, target: Target, tensor: Tensor) -> int:
        """Copy `tensor` (the target's shape, any strides, device or float dtype) into its slot, cast once.

        Returns:
            Bytes written; 0 for a tied weight that is there already.

        Raises:
            WeightUpdateError: the tensor is tied to one already written and differs from it.
        """
        parts = self.parts(target)
        pieces = tensor.split([part.shape[0] for part in target.parts]) if len(parts) > 1 else (tensor,)
        if target.again:
            if not all(torch.equal(part, piece.to(part)) for part, piece in zip(parts, pieces, strict=True)):
                raise WeightUpdateError(
                    "lm_head.weight and the embedding differ, but the model's config ties them",
                    fix="Give one of them, or set tie_word_embeddings=False in the model's config.",
                )
            return 0
        for part, piece in zip(parts, pieces, strict=True):
            part.copy_(piece)
        return sum(part.nbytes for part in parts)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, live view) of every weight, ties once, in slot order."""
        for slot in self.slots:
            views = self.parts(Target(slot, 0, len(slot.parts)))
            yield from zip((part.hf_name for part in slot.parts), views, strict=True)

    def checksum(self) -> str:
        """`tokenspeed_rl.weights.checksum` of `parameters`."""
        return checksum(self.parameters())

    def receipt(self, *, loaded: Sequence[str], nbytes: int, seconds: float, kind: str) -> Receipt:
        """Report of the change just committed; the checksum is computed when first asked for."""
        return Receipt(
            loaded=tuple(loaded),
            bytes=nbytes,
            seconds=seconds,
            version=self.version.label,
            kind=kind,
            compute_checksum=self._checksum_of_epoch(),
        )

    def _checksum_of_epoch(self) -> Callable[[], str | None]:
        epoch = self.version.epoch
        return lambda: self.checksum() if self.version.valid and self.version.epoch == epoch else None
