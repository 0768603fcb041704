"""A device of host memory for tests: small, exhaustible, and unforgiving of what touches unmapped memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokenspeed_rl.errors import EngineStateError, OutOfMemoryError
from tokenspeed_rl.memory.anonymous import AnonymousBlock
from tokenspeed_rl.memory.base import BlockMemory
from tokenspeed_rl.memory.block import Span
from tokenspeed_rl.memory.region import Backup, Region

POISON = 0xFF
"""Every byte of memory just mapped or given back: NaN in floats, -1 in signed integers."""


class FakeVMM(BlockMemory):
    """A `Memory` of the CPU with a capacity of its own.

    Args:
        capacity: bytes that can be mapped at once.
        unit: bytes mapped at a time.
        fail_at: how many maps from now the one is that fails, 1 the next; None when none does. It counts
            down, may be set at any time, and is None again once a map has failed.

    Attributes:
        maps, unmaps, saves: how often each has succeeded.
    """

    def __init__(self, capacity: int = 1 << 40, *, unit: int = 4096, fail_at: int | None = None) -> None:
        super().__init__(torch.device("cpu"), unit)
        self.capacity = capacity
        self.fail_at = fail_at
        self.maps = self.unmaps = self.saves = 0
        self.blocks: WeakSet[FakeBlock] = WeakSet()

    def free(self) -> int:
        """Capacity that isn't mapped."""
        return max(0, self.capacity - self.ledger.mapped)

    def total(self) -> int:
        """The capacity."""
        return self.capacity

    def new_block(self, nbytes: int) -> FakeBlock:
        """Host addresses."""
        block = FakeBlock(self, nbytes)
        self.blocks.add(block)
        return block

    def admit(self, nbytes: int) -> None:
        """Raise `OutOfMemoryError` at `fail_at` and beyond the capacity."""
        if self.fail_at is not None:
            self.fail_at = self.fail_at - 1 or None
            if self.fail_at is None:
                raise OutOfMemoryError("this map was told to fail", nbytes, self.free())
        super().admit(nbytes)

    def save(self, region: Region) -> Backup:
        """As `Memory.save`; the backup takes nothing of the capacity."""
        backup = super().save(region)
        self.saves += 1
        return backup

    def guard(self) -> AbstractContextManager[object]:
        """While it is entered, ops of this thread that touch unmapped memory raise EngineStateError."""
        return _Guard(self)


class FakeBlock(AnonymousBlock):
    """Host addresses of which only the mapped may be touched."""

    def __init__(self, memory: FakeVMM, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes
        self.mapped: tuple[Span, ...] = ()
        self._memory = memory

    def commit(self, spans: Sequence[Span]) -> None:
        """Poison the spans and count them as mapped."""
        self._poison(spans)
        self.mapped = tuple(spans)
        self._memory.maps += 1

    def decommit(self, spans: Sequence[Span]) -> None:
        """Poison the spans, which stay readable to whatever no guard watches."""
        self._poison(spans)
        self.mapped = ()
        self._memory.unmaps += 1

    def has_unmapped(self, start: int, stop: int) -> bool:
        """Whether the addresses from `start` to before `stop` hold any of this block that isn't mapped."""
        inside = _overlap(start, stop, self.address, self.nbytes)
        return inside > sum(_overlap(start, stop, *span) for span in self.mapped)

    @staticmethod
    def _poison(spans: Sequence[Span]) -> None:
        for address, nbytes in spans:
            ctypes.memset(address, POISON, nbytes)


class _Guard(TorchDispatchMode):
    def __init__(self, memory: FakeVMM) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not getattr(func, "is_view", False):  # views look at shapes and strides alone
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.numel():
                    self._check(func, leaf)
        return func(*args, **(kwargs or {}))

    def _check(self, func: Any, tensor: Tensor) -> None:
        size = tensor.element_size()
        pairs = zip(tensor.stride(), tensor.shape, strict=True)
        dims = sorted(((stride * size, n) for stride, n in pairs if stride and n > 1), reverse=True)
        for block in list(self._memory.blocks):
            if _reaches(tensor.data_ptr(), dims, size, block.has_unmapped):
                raise EngineStateError(
                    f"{func} touches memory that isn't mapped",
                    got=(tuple(tensor.shape), tensor.dtype),
                    fix="Map the region first, or don't run this while it is released.",
                )


def _reaches(start: int, dims: Sequence[tuple[int, int]], size: int, bad: Callable[[int, int], bool]) -> bool:
    """Whether any element is bad. `dims` are (stride in bytes, length), the longest stride first."""
    if not bad(start, start + size + sum(stride * (n - 1) for stride, n in dims)):
        return False
    if _dense(dims, size):
        return True
    (stride, n), rest = dims[0], dims[1:]
    return any(_reaches(start + i * stride, rest, size, bad) for i in range(n))


def _dense(dims: Sequence[tuple[int, int]], size: int) -> bool:
    """Whether the elements leave no gap between them."""
    for stride, n in reversed(dims):
        if stride > size:
            return False
        size += stride * (n - 1)
    return True


def _overlap(start: int, stop: int, address: int, nbytes: int) -> int:
    return max(0, min(stop, address + nbytes) - max(start, address))
