"""Host memory straight from the system, to which it really goes back."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence

import torch

from tokenspeed_rl.errors import EngineStateError, OutOfMemoryError
from tokenspeed_rl.memory.block import Block, Span, round_up
from tokenspeed_rl.memory.free import free_bytes

PAGE = mmap.PAGESIZE

_NORESERVE = 0x4000  # Linux; Python 3.11 has no name for it
_DONTFORK = getattr(mmap, "MADV_DONTFORK", None)
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class AnonymousBlock(Block):
    """Private anonymous pages: memory comes with the first touch of each.

    A forked child doesn't have them, so that it can't keep alive what this process gives back. They are no
    `mmap.mmap`, which a child would unmap on its way out, whatever lies at these addresses there.

    Raises:
        OutOfMemoryError: the system reserves no such addresses.
    """

    def __init__(self, nbytes: int) -> None:
        size = max(PAGE, round_up(nbytes, PAGE))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if address == _FAILED:
            raise OutOfMemoryError(
                f"the system reserves no addresses ({os.strerror(ctypes.get_errno())})",
                wanted=size,
                free=free_bytes(torch.device("cpu")),
                fix="Ask for less, or lift the limits on address space (ulimit -v, vm.overcommit_memory).",
            )
        self.address: int = address
        weakref.finalize(self, _unmap, address, size, os.getpid()).atexit = False
        if _DONTFORK is not None:
            _advise(address, size, _DONTFORK)

    def commit(self, spans: Sequence[Span]) -> None:
        """The pages are there already."""

    def decommit(self, spans: Sequence[Span]) -> None:
        """The pages go back to the system; read again, they would be zeros."""
        for address, nbytes in spans:
            _advise(address, nbytes, mmap.MADV_DONTNEED)


def untouched(spans: Sequence[Span]) -> int:
    """Bytes of pages that have no memory yet, and will take it from what is free when they are written."""
    pages = 0
    for address, nbytes in spans:
        resident = ctypes.create_string_buffer(nbytes // PAGE)
        _check("mincore", _libc.mincore(address, nbytes, resident))
        pages += resident.raw.count(0)
    return pages * PAGE


def _advise(address: int, nbytes: int, advice: int) -> None:
    _check("madvise", _libc.madvise(address, nbytes, advice))


def _check(name: str, status: int) -> None:
    if status:
        raise EngineStateError(f"{name} failed: {os.strerror(ctypes.get_errno())}")


def _unmap(address: int, nbytes: int, pid: int) -> None:
    if os.getpid() == pid:
        _libc.munmap(address, nbytes)
