"""The engine's weights: one tensor per slot, owned by the engine or shared with a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tokenspeed_rl.errors import WeightsInvalidError
from tokenspeed_rl.region import Region
from tokenspeed_rl.weights.adapters import Adapter, adapter_parameters
from tokenspeed_rl.weights.digest import checksum
from tokenspeed_rl.weights.mapping import NameMap, Slot, Target
from tokenspeed_rl.weights.plain import lacks_memory
from tokenspeed_rl.weights.receipt import Receipt
from tokenspeed_rl.weights.version import WeightVersion

_AT_ONCE = 1 << 22  # values compared at a time
ALIGNMENT = 256
"""Bytes: every owned slot starts at a multiple, enough for vector loads on any device."""


class WeightStore:
    """Every slot's tensors, their version, and the Hugging Face names under which they are read and written.

    `weights` is what the decoder reads: slot name -> ``(fused,)``, or the parts in order where they don't lie
    side by side. The dict is one object for life. `adapters` has a module's LoRA adapters by name; it is
    replaced whole, and may be read on any thread. Owned tensors keep their addresses for life; sharing
    replaces values. Not thread-safe: the loop's thread calls, but for an update's writes, which come on its
    caller's while the loop takes no steps. Owned tensors are ordinary ones also where the caller infers.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        version: str = "default",
        reserve: Callable[[int], Region] | None = None,
    ) -> None:
        """`reserve` gives a region of so many bytes for weights of the engine's own; None: memory of torch's,
        which can't be released."""
        self.slots = tuple(slots)
        self.names = NameMap(self.slots)
        self.dtype = dtype
        self.device = torch.device(device)
        self.version = WeightVersion(version)
        self.weights: dict[str, tuple[Tensor, ...]] = {}
        self.adapters: Mapping[str, Adapter] = {}
        self.owned = False
        self.region: Region | None = None
        self.guard: Callable[[Callable[[], str | None]], str | None] = _at_once
        """Through it a receipt's checksum reads the weights, which may sleep or be half written by then."""
        self.region_bytes = 0
        self.bindings = 0
        """How often slots were bound to other memory: whoever keeps their addresses looks here."""
        self._reserve = reserve
        self._changes = 0  # odd while an update is writing

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in the store's dtype, gaps not counted."""
        return sum(part.numel for slot in self.slots for part in slot.parts) * self.dtype.itemsize

    @torch.inference_mode(False)
    def allocate(self) -> None:
        """Map one region of the engine's own for all slots, fused and aligned; values are undefined."""
        if self.owned:
            return
        places, total = {}, 0
        for slot in self.slots:
            size = sum(part.numel for part in slot.parts) * self.dtype.itemsize
            places[slot.name] = (total, size)
            total += -(-size // ALIGNMENT) * ALIGNMENT
        raw = self._map(total + ALIGNMENT)
        skip = -raw.data_ptr() % ALIGNMENT
        for slot in self.slots:
            start, size = places[slot.name]
            self.weights[slot.name] = (
                raw[skip + start : skip + start + size].view(self.dtype).view(slot.shape),
            )
        self.owned = True
        self.bindings += 1

    def borrow(
        self, tensors: Mapping[str, tuple[Tensor, ...]], adapters: Mapping[str, Adapter] | None = None
    ) -> None:
        """Read every slot, and these adapters, from somebody else's tensors from now on; memory of the
        engine's own is let go."""
        self.weights.update(tensors)
        self.adapters = adapters or {}
        self.owned = False
        self.bindings += 1
        self._let_go()

    def close(self) -> None:
        """Forget every tensor, and give back what is the engine's own as soon as nobody holds one."""
        self.weights.clear()
        self.adapters = {}
        self._let_go()

    def parts(self, target: Target) -> list[Tensor]:
        """Views of the target's parts, in order, each with its own shape; of a packed target the one tensor.

        Raises:
            WeightsInvalidError: they are a trainer's, who has freed their memory.
        """
        tensors = self.weights[target.slot.name]
        if not self.owned and any(map(lacks_memory, tensors)):
            raise _freed(target.slot.name)
        if (found := self._as_they_lie(target)) is not None:
            return found
        sizes = [part.shape[0] for part in target.slot.parts]
        return list(_rows(target.slot, tensors[0]).split(sizes)[target.start : target.stop])

    def places(self, target: Target) -> list[Tensor]:
        """Views that cover the target's memory: one where its parts lie side by side, else one for each."""
        if (found := self._as_they_lie(target)) is not None:
            return found
        slot = target.slot
        rows = [part.shape[0] for part in slot.parts]
        start, count = sum(rows[: target.start]), sum(rows[target.start : target.stop])
        return [_rows(slot, self.weights[slot.name][0]).narrow(0, start, count)]

    def _as_they_lie(self, target: Target) -> list[Tensor] | None:
        """The tensors of a target that are no part of a larger one; None: its rows are."""
        slot, tensors = target.slot, self.weights[target.slot.name]
        if target.packed:
            return list(tensors)
        apart = slot.packed is None and len(tensors) == len(slot.parts)
        return list(tensors[target.start : target.stop]) if apart else None

    def write(self, target: Target, tensor: Tensor) -> int:
        """Copy `tensor` (the target's shape, any strides, device or float dtype) into its slot, cast once.

        Returns:
            Bytes written.
        """
        places = self.places(target)
        for place, piece in zip(places, _split(tensor.detach(), places), strict=True):
            place.copy_(piece)
        return sum(place.nbytes for place in places)

    @torch.no_grad()
    def agrees(self, target: Target, tensor: Tensor, given: Tensor | None = None) -> bool:
        """Whether `tensor`, cast as it would be written, equals the weight it is tied to.

        Args:
            given: that weight as it came, not yet written; None: what the store holds at `target`.
        """
        others = self.places(target) if given is None else [given]
        return all(
            same_values(other, piece, self.dtype)
            for other, piece in zip(others, _split(tensor, others), strict=True)
        )

    def is_elsewhere_in_it(self, name: str, tensor: Tensor) -> bool:
        """Whether `tensor` lies in the engine's own memory, but not where the weight `name` is kept."""
        target = self.names.resolve(name)
        if self.region is None or target is None:
            return False
        start, at = self.region.bytes.data_ptr(), tensor.data_ptr()
        if tensor.device != self.region.bytes.device or not start <= at < start + self.region_bytes:
            return False
        place = self.places(target)[0]
        return not (at == place.data_ptr() and tensor.shape == place.shape and tensor.is_contiguous())

    def settle(self) -> None:
        """Wait for everything that reads or writes the weights on the device, on whatever stream."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def begin_writing(self) -> None:
        """An update is about to change bytes: no checksum can be had before `end_writing`. Any one thread."""
        assert self._changes % 2 == 0
        self.settle()
        self._changes += 1

    def end_writing(self) -> None:
        """The update's bytes are all there and settled, or its old ones are back. Can't fail."""
        assert self._changes % 2 == 1
        self._changes += 1

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, live view) of every weight, ties once, in slot order; then (PEFT's name
        without its prefix, live view) of the adapters' tensors."""
        for slot in self.slots:
            views = self.parts(Target.whole(slot))
            yield from zip((part.hf_name for part in slot.parameters), views, strict=True)
        for name, tensor in adapter_parameters(self.adapters):
            if lacks_memory(tensor):
                raise _freed(name)
            yield name, tensor

    def find(self, name: str) -> list[Tensor] | None:
        """The parts of a weight by any of its names, or an adapter's tensor by PEFT's; None: there is none.

        Raises:
            WeightsInvalidError: as `parts`.
        """
        target = self.names.resolve(name)
        if target is not None:
            return self.parts(target)
        bare = self.names.canonical(name)
        return next(([tensor] for other, tensor in adapter_parameters(self.adapters) if other == bare), None)

    def checksum(self) -> str:
        """`tokenspeed_rl.weights.checksum` of `parameters`."""
        return checksum(self.parameters())

    def receipt(
        self, *, loaded: Sequence[str], nbytes: int, seconds: float, kind: str, missing: Sequence[str] = ()
    ) -> Receipt:
        """Report of the change just made; the checksum is computed when first asked for."""
        return Receipt(
            loaded=tuple(loaded),
            missing=tuple(missing),
            bytes=nbytes,
            seconds=seconds,
            version=self.version.label if self.version.valid else "invalid",
            kind=kind,
            compute_checksum=self._checksum_of_epoch(),
        )

    def _map(self, nbytes: int) -> Tensor:
        """[at least nbytes] uint8 of the engine's own."""
        if self._reserve is None:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        region = self._reserve(nbytes)
        try:
            region.map(nbytes)
        except BaseException:
            region.close()
            raise
        self.region, self.region_bytes = region, nbytes
        return region.bytes[0]

    def _let_go(self) -> None:
        region, self.region, self.region_bytes = self.region, None, 0
        if region is not None:
            region.close()

    def _checksum_of_epoch(self) -> Callable[[], str | None]:
        epoch, valid = self.version.epoch, self.version.valid

        def compute() -> str | None:
            changes = self._changes
            if not (valid and self._holds(epoch) and changes % 2 == 0):
                return None
            digest = self.checksum()
            return digest if self._holds(epoch) and self._changes == changes else None

        return lambda: self.guard(compute)

    def _holds(self, epoch: int) -> bool:
        return self.version.valid and self.version.epoch == epoch


def _freed(name: str) -> WeightsInvalidError:
    return WeightsInvalidError(
        f"the memory of {name} was freed by its trainer", fix="Call share_weights(module) again."
    )


def _at_once(read: Callable[[], str | None]) -> str | None:
    return read()


def _rows(slot: Slot, tensor: Tensor) -> Tensor:
    """The slot's tensor as its parts stacked."""
    return tensor if slot.packed is None else tensor.flatten(0, tensor.ndim - len(slot.parts[0].shape))


def _split(tensor: Tensor, places: Sequence[Tensor]) -> Sequence[Tensor]:
    return (tensor,) if len(places) == 1 else tensor.split([place.shape[0] for place in places])


def same_values(left: Tensor, right: Tensor, dtype: torch.dtype) -> bool:
    """Same values in `dtype`, where a NaN equals itself; at once for one memory under two names.

    A few rows at a time, so that casts and masks take next to no memory.
    """
    alike = left.dtype is right.dtype and left.stride() == right.stride()
    if alike and left.data_ptr() == right.data_ptr() and left.device == right.device:
        return True
    rows = max(1, _AT_ONCE * len(left) // max(1, left.numel()))
    for some, others in zip(left.split(rows), right.split(rows), strict=True):
        here, there = some.to(dtype), others.to(left.device, dtype)
        if not torch.equal(here, there):
            same = (here == there) | (here.isnan() & there.isnan())
            if not bool(same.all()):
                return False
    return True
