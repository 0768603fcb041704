"""Objects of torch that have threads, which a forked child lacks: it must never destroy these objects."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import TypeVar

T = TypeVar("T")
_threaded: weakref.WeakSet[object] = weakref.WeakSet()


def immortal_in_children(thing: T) -> T:
    """`thing`; forked children leave it alone, at their exit too: its destructor waits for its threads."""
    _threaded.add(thing)
    return thing


def _leak() -> None:
    for thing in _threaded:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


os.register_at_fork(after_in_child=_leak)
