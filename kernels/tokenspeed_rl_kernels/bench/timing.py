"""How long two calls take, each in turn, so that what else the machine does meets both alike."""

import time
from collections.abc import Callable

import torch

L2 = 256 << 20
"""Bytes that leave nothing of what was read before in a GPU's caches."""


def seconds(*calls: Callable[[], object], device: torch.device, budget: float = 0.5) -> list[float]:
    """The least time of each call, for what a busy machine adds isn't its own; ``budget`` is for each."""
    timed = _on_gpu if device.type == "cuda" else _on_cpu
    loops = []
    for call in calls:
        timed(call, 3)
        loops.append(max(1, int(0.002 / timed(call, 1))) if device.type == "cpu" else 1)
    first = [timed(call, n) for call, n in zip(calls, loops, strict=True)]
    rounds = max(
        5, min(200, int(budget * len(calls) / sum(t * n for t, n in zip(first, loops, strict=True))))
    )
    times = [[timed(call, n) for call, n in zip(calls, loops, strict=True)] for _ in range(rounds)]
    return [min(column) for column in zip(*times, strict=True)]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a large copy: the best of several."""
    source = torch.zeros(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timed = _on_gpu if device.type == "cuda" else _on_cpu
    return 2 * len(source) / min(timed(lambda: target.copy_(source), 1) for _ in range(10))


def _on_cpu(call: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def _on_gpu(call: Callable[[], object], count: int) -> float:
    """By events, from caches that were emptied: while they are, the host runs ahead and launches the call."""
    total = 0.0
    flush = torch.empty(L2, dtype=torch.int8, device="cuda")
    for _ in range(count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        total += start.elapsed_time(end) / 1e3
    return total / count
