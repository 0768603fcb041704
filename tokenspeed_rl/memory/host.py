"""Memory of the CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch

from tokenspeed_rl.memory.anonymous import PAGE, AnonymousBlock, untouched
from tokenspeed_rl.memory.base import BlockMemory
from tokenspeed_rl.memory.block import Span
from tokenspeed_rl.memory.free import free_bytes, total_bytes

_blocks: WeakValueDictionary[int, HostBlock] = WeakValueDictionary()
"""All of the process, since its engines share what is free. It has no lock, which a fork or the garbage
collector could find taken: it is changed, and read by `valuerefs`, in single, atomic steps."""


class HostMemory(BlockMemory):
    """Regions in private anonymous pages, which go back to the system at `unmap`.

    Mapping takes no time, as each page comes when it is first touched. So that the kernel needs to kill
    nobody then, more than is free is refused, and what is mapped but not yet touched, by any engine of the
    process, doesn't count as free.

    A forked child has none of it: touching a tensor over it there ends the child.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), PAGE)

    def free(self) -> int:
        """Bytes that could be mapped now."""
        blocks = (ref() for ref in _blocks.valuerefs())
        promised = sum(block.promised() for block in blocks if block is not None)
        return max(0, free_bytes(self.device) - promised)

    def total(self) -> int:
        """Bytes of the machine, within the process's limit."""
        return total_bytes(self.device)

    def new_block(self, nbytes: int) -> HostBlock:
        """Addresses for `nbytes`."""
        return HostBlock(nbytes)

    def host_free(self) -> int:
        """Bytes that backups could have now, next to the regions."""
        return self.free()


class HostBlock(AnonymousBlock):
    """Host addresses, and what was promised of them."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self._spans: tuple[Span, ...] = ()
        self._pid = os.getpid()
        _blocks[id(self)] = self

    def commit(self, spans: Sequence[Span]) -> None:
        """Promise the spans; their pages come when they are touched."""
        self._spans = tuple(spans)

    def decommit(self, spans: Sequence[Span]) -> None:
        """The pages go back to the system."""
        super().decommit(spans)
        self._spans = ()

    def promised(self) -> int:
        """Bytes mapped and not yet touched; 0 in a forked child, which doesn't have them. From any thread."""
        return untouched(self._spans) if self._pid == os.getpid() else 0
