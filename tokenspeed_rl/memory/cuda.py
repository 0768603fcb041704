"""Memory of a CUDA device, through the driver's virtual memory management."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from tokenspeed_rl.errors import OutOfMemoryError
from tokenspeed_rl.memory.backup import Pinning
from tokenspeed_rl.memory.base import BlockMemory
from tokenspeed_rl.memory.block import Block, Span
from tokenspeed_rl.memory.cuda_driver import OUT_OF_MEMORY, CudaDriver, CudaDriverError
from tokenspeed_rl.memory.free import free_bytes
from tokenspeed_rl.memory.region import Backup, Region

Call = tuple[Any, ...]
"""A driver function's name and arguments."""


class CudaMemory(BlockMemory):
    """Regions at fixed device addresses, outside torch's allocator, so that any setting of it will do.

    Backups are pinned, in pages that go back to the system when they are closed.

    Args:
        device: without an index, torch's current device.
        driver: what has the functions of `cuda.bindings.driver`, which it is when None.

    Raises:
        ConfigError: cuda-bindings or the driver isn't there.
    """

    def __init__(self, device: torch.device, driver: Any = None) -> None:
        if device.index is None:
            device = torch.device(device.type, torch.cuda.current_device())
        self.driver = CudaDriver(device.index, driver)
        api = self.driver.api
        self._properties = api.CUmemAllocationProp()
        self._properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device.index
        minimum = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        unit = int(self.driver("cuMemGetAllocationGranularity", self._properties, minimum))
        super().__init__(device, unit)
        self.pinning = Pinning(self._pin, self._unpin)

    def free(self) -> int:
        """Bytes that the driver could give now; what torch's allocator has cached goes back to it first."""
        torch.cuda.empty_cache()
        return self._info()[0]

    def total(self) -> int:
        """Bytes of the device."""
        return self._info()[1]

    def new_block(self, nbytes: int) -> Block:
        """Addresses on the device."""
        return CudaBlock(self.driver, max(nbytes, self.unit), self._properties)

    def save(self, region: Region) -> Backup:
        """As `Memory.save`; waits for everything that runs on the device, which may still write."""
        with self.driver.context():
            self.driver("cuCtxSynchronize")
        return super().save(region)

    def _info(self) -> tuple[int, int]:
        with self.driver.context():
            free, total = self.driver("cuMemGetInfo")
        return int(free), int(total)

    def _pin(self, address: int, nbytes: int) -> None:
        try:
            with self.driver.context():
                self.driver("cuMemHostRegister", address, nbytes, 0)
        except CudaDriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            free = free_bytes(torch.device("cpu"))
            raise OutOfMemoryError("host memory for a backup can't be pinned", nbytes, free) from error

    def _unpin(self, address: int) -> None:
        if not self.driver.forked:
            with suppress(CudaDriverError), self.driver.context():
                self.driver("cuMemHostUnregister", address)


class CudaBlock(Block):
    """Device addresses. Memory is created per span, and a driver call that fails undoes those before it."""

    def __init__(self, driver: CudaDriver, nbytes: int, properties: Any) -> None:
        self._driver = driver
        self._properties = properties
        self._access = driver.api.CUmemAccessDesc()
        self._access.location = properties.location
        self._access.flags = driver.api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._undo: list[Call] = []
        with driver.context():
            self.address = int(driver("cuMemAddressReserve", nbytes, 0, 0, 0))
        weakref.finalize(self, _give_back, driver, self._undo, self.address, nbytes).atexit = False

    def commit(self, spans: Sequence[Span]) -> None:
        """Put memory behind all spans.

        Raises:
            OutOfMemoryError, CudaDriverError: behind none then.
        """
        try:
            with self._driver.context():
                self._commit(spans)
        except CudaDriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            with self._driver.context():
                free, _ = self._driver("cuMemGetInfo")
            wanted = sum(nbytes for _, nbytes in spans)
            raise OutOfMemoryError("the device has too little free memory", wanted, int(free)) from error

    def decommit(self, spans: Sequence[Span]) -> None:
        """Give all memory back, once nothing that runs on the device can use it any more.

        Raises:
            CudaDriverError: some is still there; the next call goes on where this one failed.
        """
        with self._driver.context():
            self._driver("cuCtxSynchronize")
            _undo(self._driver, self._undo)

    def _commit(self, spans: Sequence[Span]) -> None:
        driver = self._driver
        _undo(driver, self._undo)  # what an earlier failure may have left
        try:
            for address, nbytes in spans:
                handle = driver("cuMemCreate", nbytes, self._properties, 0)
                self._undo.append(("cuMemRelease", handle))
                driver("cuMemMap", address, nbytes, 0, handle, 0)
                self._undo.append(("cuMemUnmap", address, nbytes))
                driver("cuMemSetAccess", address, nbytes, [self._access], 1)
        except CudaDriverError:
            _undo(driver, self._undo)
            raise


def _undo(driver: CudaDriver, calls: list[Call]) -> None:
    """Make the calls, the last first; those made are gone from the list, whatever happens."""
    while calls:
        driver(*calls[-1])
        calls.pop()


def _give_back(driver: CudaDriver, calls: list[Call], address: int, nbytes: int) -> None:
    """Nobody can handle an error here: a context that is dead has given everything back already."""
    if driver.forked:
        return
    with suppress(CudaDriverError), driver.context():
        driver("cuCtxSynchronize")
        _undo(driver, calls)
        driver("cuMemAddressFree", address, nbytes)
