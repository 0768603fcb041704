"""Calls of the CUDA driver API, checked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from tokenspeed_rl.errors import ConfigError, EngineStateError

OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""


class CudaDriverError(EngineStateError):
    """The CUDA driver refused a call; what the engine had begun was undone.

    Attributes:
        call: name of the function.
        code: what it returned, a CUresult.
    """

    def __init__(self, call: str, code: int, name: str = "") -> None:
        super().__init__(f"{call} failed: {name} ({code})")
        self.call = call
        self.code = code
        self.args = (call, code, name)


class CudaDriver:
    """The driver, for one device.

    Its primary context is the one torch uses; it is kept until the process ends, as torch keeps it.

    Args:
        api: what has the driver's functions and types; None: `cuda.bindings.driver`.

    Raises:
        ConfigError: the package or the driver isn't there.
    """

    def __init__(self, ordinal: int, api: Any = None) -> None:
        self.api = _bindings() if api is None else api
        self._pid = os.getpid()
        try:
            self("cuInit", 0)
        except RuntimeError as error:  # the bindings load, but find no libcuda
            raise ConfigError(
                "the NVIDIA driver can't be loaded", got=str(error), fix='Use device="cpu".'
            ) from error
        self._context = self("cuDevicePrimaryCtxRetain", self("cuDeviceGet", ordinal))

    def __call__(self, name: str, *args: Any) -> Any:
        """What the function returns besides its status: nothing, one value or a tuple.

        Raises:
            CudaDriverError: its status is an error.
        """
        status, *values = getattr(self.api, name)(*args)
        if int(status):
            raise CudaDriverError(name, int(status), status.name)
        return tuple(values) if len(values) > 1 else next(iter(values), None)

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that made it, where no call may be made."""
        return os.getpid() != self._pid

    @contextmanager
    def context(self) -> Iterator[None]:
        """The device's context is this thread's within; the thread's own is back afterwards."""
        self("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self("cuCtxPopCurrent")


def _bindings() -> Any:
    try:
        return import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ConfigError(
            "releasing memory of a CUDA device needs the package cuda-bindings",
            fix='pip install "tokenspeed_rl[cuda]"',
        ) from error
