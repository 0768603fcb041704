"""Work on a device that is recorded once and run many times."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import torch

_ONE_AT_A_TIME = threading.Lock()
"""Of all engines: CUDA knows one capture in a process."""


class Capture(Protocol):
    """A device's way to run the same work again."""

    nbytes: int
    """Bytes that captured work holds."""

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Prepare `work`, which is run once or more for it; what is returned runs it."""

    def close(self) -> None:
        """Give back what captured work holds; it is run no more."""


class CallAgain:
    """No capture: the work is called anew, after one rehearsal. Where kernels are interpreted."""

    nbytes = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Capture`."""
        work()
        return work

    def close(self) -> None:
        """Nothing was held."""


class CudaCapture:
    """CUDA graphs in one memory pool, recorded on one stream: only so does one reuse another's memory."""

    def __init__(self, device: torch.device) -> None:
        self.nbytes = 0
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Capture`. Other threads may launch and allocate meanwhile; one that synchronises the whole
        device has an error of CUDA's, and so has the capture."""
        with _ONE_AT_A_TIME, torch.cuda.device(self._device):
            stream = self._stream = self._stream or torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # is left, too, where a capture fails
                work()  # kernels are compiled and workspaces made before anything is recorded
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # as a capture begins: else what it frees of others' would count
                before, graph = torch.cuda.memory_reserved(), torch.cuda.CUDAGraph()
                pool = self._graphs[0].pool() if self._graphs else None
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    work()
            torch.cuda.current_stream().wait_stream(stream)
            self._graphs.append(graph)
            self.nbytes += max(0, torch.cuda.memory_reserved() - before)
        return graph.replay

    def close(self) -> None:
        """See `Capture`."""
        for graph in self._graphs:
            graph.reset()
        self._graphs, self.nbytes = [], 0
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()
