"""Memories of three kinds, and a CUDA driver over host memory that checks how it is called."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenspeed_rl.memory import CudaMemory, FakeVMM, HostMemory, Memory, host

GRANULARITY = 1 << 16


class CUresult(IntEnum):
    """As in cuda.h."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_DEINITIALIZED = 4
    CUDA_ERROR_INVALID_CONTEXT = 201


class Refused(Exception):
    """What ends a call with a status."""


class FakeDriver:
    """Stands for `cuda.bindings.driver`: calls return tuples, and what the real driver forbids is refused.

    Addresses are real ones of host memory. `misuse` lists calls that broke a rule.
    """

    CUresult = CUresult
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    def __init__(self, capacity: int = 1 << 30) -> None:
        self.capacity = capacity
        self.calls: list[str] = []
        self.misuse: list[str] = []
        self.fail_at: int | None = None
        self.fail_with = CUresult.CUDA_ERROR_OUT_OF_MEMORY
        self.dead = False
        self.reserved: dict[int, tuple[int, mmap.mmap]] = {}
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.accessible: set[int] = set()
        self.registered: dict[int, int] = {}
        self.contexts: list[str] = []
        self._sizes: dict[int, int] = {}
        self._pid = os.getpid()

    @staticmethod
    def CUmemAllocationProp() -> SimpleNamespace:
        return SimpleNamespace(type=None, location=SimpleNamespace(type=None, id=None))

    @staticmethod
    def CUmemAccessDesc() -> SimpleNamespace:
        return SimpleNamespace(location=None, flags=None)

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        if not name.startswith("cu"):
            raise AttributeError(name)
        action = object.__getattribute__(self, f"_{name}")

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if os.getpid() != self._pid:
                os.write(2, f"{name} in a forked child\n".encode())
            if self.dead:
                return self._statuses(CUresult.CUDA_ERROR_DEINITIALIZED, name)
            if self.fail_at is not None:
                self.fail_at -= 1
                if self.fail_at == 0:
                    self.fail_at = None
                    return self._statuses(self.fail_with, name)
            try:
                value = action(*args)
            except Refused as refused:
                status = refused.args[0]
                if status is not CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                    self.misuse.append(f"{name}{args}: {refused.args[1]}")
                return self._statuses(status, name)
            return (
                CUresult.CUDA_SUCCESS,
                *(value if isinstance(value, tuple) else () if value is None else (value,)),
            )

        return call

    @property
    def used(self) -> int:
        """Bytes of allocations that a handle or a mapping keeps."""
        kept = set(self.handles) | {handle for _, handle in self.mapped.values()}
        return sum(self._sizes[handle] for handle in kept)

    def count(self, name: str) -> int:
        return self.calls.count(name)

    def leaks(self) -> list[object]:
        return [*self.reserved, *self.handles, *self.mapped, *self.registered, *self.contexts]

    def _statuses(self, status: CUresult, name: str) -> tuple[Any, ...]:
        values = {"cuMemCreate": 1, "cuMemGetInfo": 2, "cuCtxPopCurrent": 1, "cuMemAddressReserve": 1}
        return (status, *[None] * values.get(name, 0))

    def _need(self, holds: bool, rule: str, status: CUresult = CUresult.CUDA_ERROR_INVALID_VALUE) -> None:
        if not holds:
            raise Refused(status, rule)

    def _in_context(self) -> None:
        self._need(bool(self.contexts), "no current context", CUresult.CUDA_ERROR_INVALID_CONTEXT)

    def _cuInit(self, flags: int) -> None:
        self._need(flags == 0, "flags")

    def _cuDeviceGet(self, ordinal: int) -> str:
        return f"device {ordinal}"

    def _cuDevicePrimaryCtxRetain(self, device: str) -> str:
        return f"context of {device}"

    def _cuCtxPushCurrent(self, context: str) -> None:
        self.contexts.append(context)

    def _cuCtxPopCurrent(self) -> str:
        self._in_context()
        return self.contexts.pop()

    def _cuCtxSynchronize(self) -> None:
        self._in_context()

    def _cuMemGetInfo(self) -> tuple[int, int]:
        self._in_context()
        return self.capacity - self.used, self.capacity

    def _cuMemGetAllocationGranularity(self, properties: SimpleNamespace, option: int) -> int:
        self._check(properties)
        return GRANULARITY

    def _cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> int:
        self._need(size > 0 and size % GRANULARITY == 0, "size is no multiple of the granularity")
        pages = mmap.mmap(-1, size + GRANULARITY, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        start += -start % GRANULARITY
        self.reserved[start] = (size, pages)
        return start

    def _cuMemAddressFree(self, address: int, size: int) -> None:
        self._need(self.reserved.get(address, (0,))[0] == size, "not what was reserved")
        self._need(not any(address <= start < address + size for start in self.mapped), "mapped still")
        del self.reserved[address]

    def _cuMemCreate(self, size: int, properties: SimpleNamespace, flags: int) -> int:
        self._in_context()
        self._check(properties)
        self._need(size > 0 and size % GRANULARITY == 0, "size is no multiple of the granularity")
        self._need(self.used + size <= self.capacity, "full", CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        handle = len(self._sizes) + 1
        self._sizes[handle] = self.handles[handle] = size
        return handle

    def _cuMemRelease(self, handle: int) -> None:
        self._need(handle in self.handles, "no such handle")
        del self.handles[handle]

    def _cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        self._in_context()
        self._need(self.handles.get(handle) == size and offset == 0 and flags == 0, "not the handle's size")
        self._need(address % GRANULARITY == 0, "address is no multiple of the granularity")
        inside = any(
            start <= address and address + size <= start + total
            for start, (total, _) in self.reserved.items()
        )
        self._need(inside, "not reserved")
        free = all(address + size <= start or start + n <= address for start, (n, _) in self.mapped.items())
        self._need(free, "mapped already")
        self.mapped[address] = (size, handle)
        ctypes.memset(address, 0xEE, size)

    def _cuMemSetAccess(
        self, address: int, size: int, descriptions: list[SimpleNamespace], count: int
    ) -> None:
        self._need(self.mapped.get(address, (0,))[0] == size, "not mapped")
        self._need(count == len(descriptions) == 1 and descriptions[0].flags == 3, "access")
        self._need(descriptions[0].location.type == 1 and descriptions[0].location.id == 0, "location")
        self.accessible.add(address)

    def _cuMemUnmap(self, address: int, size: int) -> None:
        self._need(self.mapped.get(address, (0,))[0] == size, "not what was mapped")
        del self.mapped[address]
        self.accessible.discard(address)

    def _cuMemHostRegister(self, address: int, size: int, flags: int) -> None:
        self._in_context()
        self._need(address % mmap.PAGESIZE == 0 and size > 0, "not whole pages")
        self._need(address not in self.registered, "registered already")
        self.registered[address] = size

    def _cuMemHostUnregister(self, address: int) -> None:
        self._in_context()
        self._need(address in self.registered, "not registered")
        ctypes.string_at(address, self.registered.pop(address))  # its pages must be there still

    def _check(self, properties: SimpleNamespace) -> None:
        self._need(properties.type == 1 and properties.location.type == 1, "properties")
        self._need(properties.location.id == 0, "device")


@dataclass
class Bench:
    """A memory to test, and how to leave it little."""

    name: str
    memory: Memory
    leave: Callable[[int], None]
    """So many bytes are free from now on."""


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    fake = FakeDriver()
    yield fake
    assert fake.misuse == []


@pytest.fixture
def cuda(driver: FakeDriver) -> CudaMemory:
    """A CUDA memory whose device memory is the host's, and so its tensors the CPU's."""
    return CudaMemory(torch.device("cpu", 0), driver)


@pytest.fixture(params=["host", "fake", "cuda"])
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bench:
    if request.param == "host":
        return Bench(
            "host", HostMemory(), lambda n: monkeypatch.setattr(host, "free_bytes", lambda device: n)
        )
    if request.param == "fake":
        fake = FakeVMM(1 << 30)
        return Bench("fake", fake, lambda n: setattr(fake, "capacity", fake.ledger.mapped + n))
    driver: FakeDriver = request.getfixturevalue("driver")
    cuda: CudaMemory = request.getfixturevalue("cuda")
    return Bench("cuda", cuda, lambda n: setattr(driver, "capacity", driver.used + n))
