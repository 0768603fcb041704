"""How many pages the KV cache gets."""

from pathlib import Path

import torch

from tokenspeed_rl.config import EngineConfig
from tokenspeed_rl.errors import OutOfMemoryError


def num_pages(config: EngineConfig, *, bytes_per_page: int, context: int, device: torch.device) -> int:
    """`max_total_tokens` in pages, else `mem_fraction` of what is free now less `reserve_bytes`.

    Never more than `max_running_requests` full contexts, which is all that could be used at once.

    Raises:
        OutOfMemoryError: not even one page fits.
    """
    useful = config.max_running_requests * -(-context // config.page_size)
    if config.max_total_tokens is not None:
        return min(useful, config.max_total_tokens // config.page_size)
    free = free_bytes(device)
    pages = int((free - config.reserve_bytes) * config.mem_fraction) // bytes_per_page
    if pages < 1:
        raise OutOfMemoryError(
            f"no page of the KV cache fits into mem_fraction={config.mem_fraction} of the memory that "
            f"reserve_bytes={config.reserve_bytes} leaves",
            wanted=bytes_per_page,
            free=free,
        )
    return min(useful, pages)


def free_bytes(device: torch.device) -> int:
    """Memory that can be had now: of the device, or of the machine within the process's memory limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo").read_text()
    available = int(meminfo.split("MemAvailable:")[1].split()[0]) * 1024
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
