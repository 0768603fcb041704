"""How fast the memory is, and how long a kernel of a graph takes that does nothing."""

from typing import Any

import torch

from gpu_suite.machine import Machine, capture


def run(machine: Machine, found: dict[str, Any]) -> None:
    """Copy a large tensor; launch many kernels on one number."""
    numbers = (1 << 20) if machine.dry else (1 << 30)
    source = torch.ones(numbers, dtype=torch.float32, device=machine.device)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = machine.race({"copy": lambda: target.copy_(source)}, rounds=10)["copy"]
    found["bytes_per_second"] = 2 * source.nbytes / seconds
    found["copied_bytes"] = source.nbytes

    count, one = 200, torch.zeros(1, device=machine.device)

    def launches() -> None:
        for _ in range(count):
            one.add_(1)

    replay = capture(launches) if machine.cuda else launches
    assert replay is not None, "adding 1 can be captured"
    launch = found["launch_seconds"] = min(machine.seconds(replay) for _ in range(10)) / count
    found["launches"] = "kernels of a CUDA graph" if machine.cuda else "calls of torch on the CPU: no graph"
    copied = found["bytes_per_second"]
    found["headlines"] = [
        f"copy {copied / 1e12:.2f} TB/s, launch {launch * 1e6:.2f} us ({found['launches']})"
    ]
