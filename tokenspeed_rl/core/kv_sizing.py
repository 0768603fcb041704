"""How large the KV cache is."""

import os
from pathlib import Path
from typing import NamedTuple

import torch

from tokenspeed_rl.config import EngineConfig
from tokenspeed_rl.errors import OutOfMemoryError


class KVSize(NamedTuple):
    """What the KV cache gets, and what a request may ask for."""

    pages: int
    tokens: int
    """Most tokens of prompt and `max_new_tokens` together."""


def kv_size(config: EngineConfig, *, bytes_per_page: int, context: int, device: torch.device) -> KVSize:
    """`max_total_tokens`, else `mem_fraction` of what is free now less `reserve_bytes`.

    Where memory decides, no more is mapped than `max_running_requests` full contexts, which is all that could
    be used at once.

    Raises:
        OutOfMemoryError: not even one page fits.
    """
    if config.max_total_tokens is not None:
        return KVSize(-(-config.max_total_tokens // config.page_size), config.max_total_tokens)
    free = free_bytes(device)
    pages = int((free - config.reserve_bytes) * config.mem_fraction) // bytes_per_page
    if pages < 1:
        raise OutOfMemoryError(
            f"no page of the KV cache fits into mem_fraction={config.mem_fraction} of the memory that "
            f"reserve_bytes={config.reserve_bytes} leaves",
            wanted=bytes_per_page,
            free=free,
        )
    useful = config.max_running_requests * -(-context // config.page_size)
    return KVSize(min(useful, pages), pages * config.page_size)


def free_bytes(device: torch.device) -> int:
    """Memory that can be had now: of the device, or of the machine within the process's memory limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():  # not Linux: what the machine has, as nothing tells what is free
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = int(meminfo.read_text().split("MemAvailable:")[1].split()[0]) * 1024
    return min(available, _left_in_cgroup())


def _left_in_cgroup() -> int:
    folder = Path("/sys/fs/cgroup")
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        reclaimable = int((folder / "memory.stat").read_text().split("\ninactive_file ")[1].split()[0])
    except (OSError, ValueError, IndexError):  # no limit, or another hierarchy
        return 1 << 62
    return max(0, limit - used + reclaimable)
