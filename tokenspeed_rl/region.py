"""A piece of memory that can be released, as those who put tensors there see it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Region(Protocol):
    """Addresses reserved for life, in `stripes` equal stripes, and memory behind the beginning of each.

    Owned by one thread, but for the counters, which any may read.
    """

    tag: str
    stripes: int
    stripe_bytes: int
    """Bytes reserved per stripe, a multiple of what the device maps at a time."""
    mapped: int
    """Bytes that have memory behind them now, all stripes together."""

    @property
    def virtual(self) -> int:
        """Bytes of reserved addresses."""
        ...

    @property
    def bytes(self) -> Tensor:
        """[stripes, stripe_bytes] uint8 over the whole region, without a copy: the same addresses for life.

        Only what is mapped may be touched. Obtained once, it stays usable across cycles.

        Raises:
            EngineStateError: nothing is mapped (and the region isn't empty), or it was closed.
        """
        ...

    def map(self, nbytes: int) -> None:
        """Put memory behind the first `nbytes` of every stripe, rounded up; what it holds is undefined.

        Raises:
            OutOfMemoryError: nothing is mapped then.
            EngineStateError: it is mapped or closed already, `nbytes` is more than a stripe, or the device
                fails; nothing was changed.
        """

    def unmap(self) -> None:
        """Give the memory back to its owner, the system or the device; the addresses stay reserved.

        What runs on the device is waited for. Where nothing is mapped, nothing is done.

        Raises:
            EngineStateError: the device fails; it may be called again.
        """

    def close(self) -> None:
        """Give back everything as soon as no tensor over it is left; no use from now on. Idempotent."""
