"""Releasable memory: regions at fixed addresses, given back to their owner and taken again."""

import torch

from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.memory.cuda import CudaMemory
from tokenspeed_rl.memory.fake import FakeVMM
from tokenspeed_rl.memory.free import free_bytes, total_bytes
from tokenspeed_rl.memory.host import HostMemory
from tokenspeed_rl.memory.region import TAGS, Backup, Memory, Region, Usage

__all__ = [
    "TAGS",
    "Backup",
    "CudaMemory",
    "FakeVMM",
    "HostMemory",
    "Memory",
    "Region",
    "Usage",
    "free_bytes",
    "memory_for",
    "total_bytes",
]


def memory_for(device: torch.device) -> Memory:
    """The memory of an engine on `device`.

    Raises:
        ConfigError: no memory of such a device can be released.
    """
    if device.type == "cuda":
        return CudaMemory(device)
    if device.type != "cpu":
        raise ConfigError("engines run on a CPU or a CUDA device", got=str(device))
    return HostMemory()
