"""The device that a section runs on, its clock, and the time that is left."""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from roofline import BANDWIDTH, LAUNCH
from torch import Tensor

Act = Callable[[], Any]
FLUSH_BYTES = 256 << 20
"""Written between two timed runs, so that none finds its inputs in the L2."""


@dataclass(slots=True, kw_only=True)
class Machine:
    """What sections are handed."""

    device: torch.device
    dry: bool
    """Toy shapes on the CPU."""
    bandwidth: float = BANDWIDTH
    """Bytes per second, as the section `bandwidth` measured them."""
    launch: float = LAUNCH
    """Seconds per kernel of a graph, from the same."""
    deadline: float = field(default=0.0)
    """On `time.monotonic`, of the section that runs."""

    @property
    def left(self) -> float:
        """Seconds that the section may still take."""
        return self.deadline - time.monotonic()

    @property
    def cuda(self) -> bool:
        """Whether this is a GPU."""
        return self.device.type == "cuda"

    def seconds(self, act: Act) -> float:
        """Of `act`, until the device has done its work."""
        self.settle()
        began = time.perf_counter()
        act()
        self.settle()
        return time.perf_counter() - began

    def alive(self) -> bool:
        """Whether the device still answers: after an illegal access it never does again."""
        try:
            self.settle()
        except RuntimeError:
            return False
        return True

    def settle(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def random(self, *shape: int, seed: int = 1, scale: float = 1.0) -> Tensor:
        """Normal numbers in bfloat16, the same on every device."""
        numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return (numbers * scale).to(self.device, torch.bfloat16)

    def used(self) -> int:
        """Bytes of the device that are in use, by anybody; on the CPU 0: regions are counted there."""
        gc.collect()
        if not self.cuda:
            return 0
        self.settle()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def race(self, acts: Mapping[str, Act], rounds: int) -> dict[str, float]:
        """Median seconds of each, in turn, each time with a cold L2, out of a graph if it can be captured.

        What can't, synchronises: it is timed as it is, its launches included.
        """
        runs = {name: capture(act) or act if self.cuda else act for name, act in acts.items()}
        flush = torch.empty(FLUSH_BYTES if self.cuda else 1, dtype=torch.int8, device=self.device)
        found: dict[str, list[float]] = {name: [] for name in acts}
        for _ in range(rounds):
            for name, run in runs.items():
                flush.zero_()
                found[name].append(self._timed(run))
        return {name: median(values) for name, values in found.items()}

    def _timed(self, run: Act) -> float:
        if not self.cuda:
            return self.seconds(run)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def capture(act: Act) -> Act | None:
    """A CUDA graph of `act`, warmed up, as what replays it; None: it synchronises, and can't be one.

    That is found out beforehand: a capture that fails leaves torch's generator unusable.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        act()
        torch.cuda.set_sync_debug_mode("error")
        try:
            act()
        except RuntimeError:
            return None
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        act()
    return graph.replay
