"""A region over a block of addresses, whatever puts memory behind them."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tokenspeed_rl.alias import tensor_at
from tokenspeed_rl.errors import EngineStateError
from tokenspeed_rl.memory.ledger import Ledger

Span = tuple[int, int]
"""Address and length of a piece of a block."""


class Block(ABC):
    """Addresses; they go back, with what is behind them, when nothing refers to the block any more."""

    address: int
    """Where it begins; a multiple of the unit in which memory is mapped."""

    @abstractmethod
    def commit(self, spans: Sequence[Span]) -> None:
        """Put memory behind all spans, or behind none where it raises."""

    @abstractmethod
    def decommit(self, spans: Sequence[Span]) -> None:
        """Give back the memory behind the spans of the last `commit`."""


class StripedRegion:
    """A `Region` over a `Block`.

    Args:
        unit: what is mapped at a time; `stripe_bytes` is a multiple of it.
        admit: told how many bytes are to be mapped; raises where they are not to be had.
    """

    def __init__(
        self,
        tag: str,
        block: Block,
        *,
        stripes: int,
        stripe_bytes: int,
        unit: int,
        device: torch.device,
        ledger: Ledger,
        admit: Callable[[int], None],
    ) -> None:
        self.tag = tag
        self.stripes = stripes
        self.stripe_bytes = stripe_bytes
        self.mapped = 0
        self.spans: tuple[Span, ...] = ()
        """What has memory behind it now."""
        self._block: Block | None = block
        self._bytes: Tensor | None = None
        self._unit = unit
        self._device = device
        self._admit = admit
        self._ledger = ledger
        self._entry = ledger.enter(tag, virtual=self.virtual)
        weakref.finalize(block, ledger.strike, self._entry).atexit = False

    @property
    def virtual(self) -> int:
        """Bytes of reserved addresses."""
        return self.stripes * self.stripe_bytes

    @property
    def bytes(self) -> Tensor:
        """[stripes, stripe_bytes] uint8 over the whole region, without a copy: the same addresses for life.

        Raises:
            EngineStateError: nothing is mapped.
        """
        block = self._open()
        if self.virtual and not self.mapped:
            raise EngineStateError(f"the region of {self.tag} has no memory behind it", fix="Map it first.")
        if self._bytes is None:  # only now: a device pointer with nothing behind it belongs to no device
            shape = (self.stripes, self.stripe_bytes)
            self._bytes = tensor_at(block.address, shape, dtype=torch.uint8, device=self._device, owner=block)
        return self._bytes

    def map(self, nbytes: int) -> None:
        """Put memory behind the first `nbytes` of every stripe, rounded up; what it holds is undefined.

        Raises:
            OutOfMemoryError, EngineStateError: nothing is mapped then, or what was mapped before still is.
        """
        block = self._open()
        if self.mapped:
            raise EngineStateError(f"the region of {self.tag} is mapped already", fix="Unmap it first.")
        if not 0 <= nbytes <= self.stripe_bytes:
            raise EngineStateError(
                f"a stripe of {self.tag} has {self.stripe_bytes:,} bytes", got=nbytes, fix="Reserve more."
            )
        each = round_up(nbytes, self._unit)
        if each == 0:
            return
        self._admit(self.stripes * each)
        spans = [(block.address + i * self.stripe_bytes, each) for i in range(self.stripes)]
        block.commit(spans)
        self._book(tuple(spans))

    def unmap(self) -> None:
        """Give the memory back to its owner; the addresses stay reserved. Nothing mapped: nothing done."""
        if self.spans:
            self._open().decommit(self.spans)
            self._book(())

    def close(self) -> None:
        """Give back everything as soon as no tensor over it is left. Idempotent."""
        self._block = self._bytes = None
        self.mapped, self.spans = 0, ()

    def _book(self, spans: tuple[Span, ...]) -> None:
        self.spans = spans
        self.mapped = sum(nbytes for _, nbytes in spans)
        self._ledger.book(self._entry, self.mapped)

    def _open(self) -> Block:
        if self._block is None:
            raise EngineStateError(f"the region of {self.tag} was closed")
        return self._block


def round_up(nbytes: int, unit: int) -> int:
    """The smallest multiple of `unit` that holds `nbytes`."""
    return -(-nbytes // unit) * unit
