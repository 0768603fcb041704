"""How much memory there is, and how much of it can be had."""

import os
from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int:
    """Memory that can be had now: of the device, or of the machine within the process's memory limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():  # not Linux: what the machine has, as nothing tells what is free
        return _installed()
    available = int(meminfo.read_text().split("MemAvailable:")[1].split()[0]) * 1024
    return min(available, _left_in_cgroup())


def total_bytes(device: torch.device) -> int:
    """Memory of the device, or of the machine within the process's memory limit, used or not."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    try:
        return min(_installed(), int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no limit, or another hierarchy
        return _installed()


def _installed() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_in_cgroup() -> int:
    folder = Path("/sys/fs/cgroup")
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        reclaimable = int((folder / "memory.stat").read_text().split("\ninactive_file ")[1].split()[0])
    except (OSError, ValueError, IndexError):  # no limit, or another hierarchy
        return 1 << 62
    return max(0, limit - used + reclaimable)
