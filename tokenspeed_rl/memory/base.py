"""What the memories of all devices have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from weakref import WeakSet

import torch

from tokenspeed_rl.errors import ConfigError, EngineStateError, OutOfMemoryError, nearest
from tokenspeed_rl.memory.backup import HostCopy, Pinning
from tokenspeed_rl.memory.block import Block, StripedRegion, round_up
from tokenspeed_rl.memory.free import free_bytes
from tokenspeed_rl.memory.ledger import Ledger
from tokenspeed_rl.memory.region import TAGS, Backup, Region, Usage


class BlockMemory(ABC):
    """A `Memory` whose regions lie over blocks.

    Args:
        device: where tensors over its regions are.
        unit: bytes mapped at a time.
    """

    pinning: Pinning | None = None

    def __init__(self, device: torch.device, unit: int) -> None:
        self.device = device
        self.unit = unit
        self.ledger = Ledger()
        self.regions: WeakSet[StripedRegion] = WeakSet()

    @abstractmethod
    def free(self) -> int:
        """Bytes that could be mapped now."""

    @abstractmethod
    def total(self) -> int:
        """Bytes of the device or machine, used or not: an upper bound for what could ever be mapped."""

    @abstractmethod
    def new_block(self, nbytes: int) -> Block:
        """Addresses for `nbytes`, a multiple of the unit, which may be 0."""

    def reserve(self, tag: str, stripe_bytes: int, stripes: int = 1) -> Region:
        """Addresses for `stripes` times at least `stripe_bytes`; nothing is mapped yet.

        Raises:
            ConfigError: an unknown tag or an impossible size.
            OutOfMemoryError: so many addresses are not to be had.
        """
        if tag not in TAGS:
            raise ConfigError("no such tag of memory", got=tag, fix=nearest(tag, TAGS))
        if stripe_bytes < 0 or stripes < 1:
            raise ConfigError(
                "a region has one stripe or more, of no negative size", got=(stripe_bytes, stripes)
            )
        stripe_bytes = round_up(stripe_bytes, self.unit)
        region = StripedRegion(
            tag,
            self.new_block(stripes * stripe_bytes),
            stripes=stripes,
            stripe_bytes=stripe_bytes,
            unit=self.unit,
            device=self.device,
            ledger=self.ledger,
            admit=self.admit,
        )
        self.regions.add(region)
        return region

    def save(self, region: Region) -> Backup:
        """Copy what `region`, one of this memory's and mapped, holds to host memory.

        Raises:
            OutOfMemoryError: the host has no room; nothing was changed.
            EngineStateError: it is not such a region.
        """
        if not isinstance(region, StripedRegion) or region not in self.regions:
            raise EngineStateError("only regions of this memory can be saved by it", got=region)
        free = self.host_free()
        if region.mapped > free:
            raise OutOfMemoryError(f"no host memory for a backup of {region.tag}", region.mapped, free)
        return HostCopy(region, self.ledger, self.pinning)

    def usage(self) -> dict[str, Usage]:
        """Per tag, all of `TAGS`, the sums over its regions and backups. From any thread."""
        return self.ledger.usage()

    @property
    def peak(self) -> int:
        """Most bytes that were mapped at once, all tags together."""
        return self.ledger.peak

    def admit(self, nbytes: int) -> None:
        """Raise `OutOfMemoryError` where `nbytes` more can't be mapped."""
        free = self.free()
        if nbytes > free:
            raise OutOfMemoryError(f"{self.device} has too little free memory", nbytes, free)

    def host_free(self) -> int:
        """Bytes of host memory that backups could have now."""
        return free_bytes(torch.device("cpu"))
