"""Copies of regions in host memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_rl.alias import tensor_at
from tokenspeed_rl.errors import EngineStateError
from tokenspeed_rl.memory.anonymous import AnonymousBlock
from tokenspeed_rl.memory.block import StripedRegion
from tokenspeed_rl.memory.ledger import Entry, Ledger


class Pinning(NamedTuple):
    """How host memory is made, and unmade, what a device copies from fast."""

    pin: Callable[[int, int], None]
    """Address, bytes."""
    unpin: Callable[[int], None]


class HostCopy:
    """A `Backup` of a mapped region, in memory of its own that no allocator caches.

    Raises:
        OutOfMemoryError: the system or the device's driver has no room; nothing is left behind.
    """

    def __init__(self, region: StripedRegion, ledger: Ledger, pinning: Pinning | None) -> None:
        self._region = region
        self._spans = region.spans
        block = AnonymousBlock(region.mapped)
        if pinning is not None and region.mapped:
            pinning.pin(block.address, region.mapped)
        entry = ledger.enter(region.tag, host=region.mapped)
        # Holds the block, so that it is unpinned before its pages go.
        self._release = weakref.finalize(self, _release, block, pinning, region.mapped, ledger, entry)
        self._release.atexit = False
        shape = (region.stripes, region.mapped // region.stripes)
        self._copy: Tensor | None = tensor_at(
            block.address, shape, dtype=torch.uint8, device=torch.device("cpu"), owner=block
        )
        del block
        try:
            for mine, theirs in self._pairs(self._copy):
                mine.copy_(theirs)
        except BaseException:
            self.close()
            raise

    def restore(self) -> None:
        """Copy it back into its region, which is mapped again as it was.

        Raises:
            EngineStateError: it is not, or the backup was closed; nothing was written.
        """
        if self._copy is None:
            raise EngineStateError(f"the backup of {self._region.tag} was closed")
        if self._region.spans != self._spans:
            raise EngineStateError(
                f"the region of {self._region.tag} is not mapped as it was when it was saved",
                got=self._region.mapped,
                fix=f"Map the same {self._copy.nbytes:,} bytes first.",
            )
        for mine, theirs in self._pairs(self._copy):
            theirs.copy_(mine)

    def close(self) -> None:
        """Give the host memory back to the system. Idempotent."""
        self._copy = None
        self._release()

    def _pairs(self, copy: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Per stripe, since a copy across stripes would take device memory for a contiguous one first."""
        return [
            (mine, theirs[: copy.shape[1]]) for mine, theirs in zip(copy, self._region.bytes, strict=True)
        ]


def _release(
    block: AnonymousBlock, pinning: Pinning | None, nbytes: int, ledger: Ledger, entry: Entry
) -> None:
    ledger.strike(entry)
    if pinning is not None and nbytes:
        pinning.unpin(block.address)
