"""Memory that shows what a kernel touches: with a guard behind it, larger than int32 can index, poisoned."""

import ctypes
import faulthandler
import mmap
import os
import signal
import traceback
from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

PROT_NONE = 0
MAP_NORESERVE = 0x4000
"""Of Linux; Python doesn't name them."""
_libc = ctypes.CDLL(None, use_errno=True)


def guarded(tensor: Tensor) -> Tensor:
    """A contiguous copy at whose end begins a page that nobody may touch: doing so is a signal."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return tensor
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, whole + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if _libc.mprotect(ctypes.c_void_p(start + whole), ctypes.c_size_t(mmap.PAGESIZE), PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect failed")
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=whole - size)
    return flat.view(tensor.shape).copy_(tensor)


def survive(run: Callable[[], object]) -> None:
    """Run it in a fork, where tensors that `torch` makes without values are guarded too.

    Raises:
        AssertionError: it raised, or a signal ended it.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        signal.alarm(60)
        try:
            _guard_new_tensors()
            run()
            os._exit(0)
        except BaseException:
            os.write(writing, traceback.format_exc().encode())
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code >= 0, f"it touched memory outside its tensors: {signal.Signals(-code).name}"
    assert code == 0, said


def _guard_new_tensors() -> None:
    """For good: in a fork."""

    def guarding(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: guarded(make(*args, **kwargs))

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        setattr(owner, name, guarding(getattr(owner, name)))


def sparse(*shape: int, dtype: torch.dtype) -> Tensor:
    """Zeros of any size, which take memory only where they are touched: never look at all of it."""
    size = prod(shape) * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype).view(shape)


def poison(dtype: torch.dtype) -> float | int:
    """What no result may depend on: NaN, or the largest integer."""
    return torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max


def poisoned(tensor: Tensor, *, margin: int = 3) -> Tensor:
    """The same values, a view of a larger tensor that is poison on all sides of it."""
    around = torch.full(
        [size + 2 * margin for size in tensor.shape], poison(tensor.dtype), dtype=tensor.dtype
    )
    return around[tuple(slice(margin, margin + size) for size in tensor.shape)].copy_(tensor)
