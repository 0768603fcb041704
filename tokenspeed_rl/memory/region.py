"""What memory an engine's regions are made of, as the engine sees it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from tokenspeed_rl.region import Region as Region

TAGS = ("weights", "kv_cache", "cuda_graph")
"""What can be released and taken back, each on its own; in the order in which a wake takes them."""


class Backup(Protocol):
    """A copy in host memory of what a region held."""

    def restore(self) -> None:
        """Copy it back into its region, which is mapped again as it was.

        Raises:
            EngineStateError: it is not, or the backup was closed; nothing was written.
        """

    def close(self) -> None:
        """Give the host memory back to the system. Idempotent."""


class Usage(NamedTuple):
    """Bytes of one tag."""

    mapped: int
    virtual: int
    host: int
    """Bytes of backups in host memory."""


class Memory(Protocol):
    """Where an engine's regions come from, and the books about them."""

    unit: int
    """Bytes mapped at a time, in every stripe of a region."""

    def reserve(self, tag: str, stripe_bytes: int, stripes: int = 1) -> Region:
        """Addresses for `stripes` times at least `stripe_bytes`; nothing is mapped yet.

        Raises:
            ConfigError: an unknown tag or an impossible size.
            OutOfMemoryError: so many addresses are not to be had.
        """
        ...

    def free(self) -> int:
        """Bytes that could be mapped now; what torch's allocator has cached on a device isn't among them."""
        ...

    def total(self) -> int:
        """Bytes of the device or machine, used or not: an upper bound for what could ever be mapped."""
        ...

    def save(self, region: Region) -> Backup:
        """Copy what `region`, one of this memory's and mapped, holds to host memory.

        Raises:
            OutOfMemoryError: the host has no room; nothing was changed.
            EngineStateError: it is not such a region.
        """
        ...

    def usage(self) -> dict[str, Usage]:
        """Per tag, all of `TAGS`, the sums over its regions and backups. From any thread."""
        ...

    @property
    def peak(self) -> int:
        """Most bytes that were mapped at once, all tags together."""
        ...
