"""What the process holds, over the run."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from pathlib import Path
from statistics import median_low
from typing import Any

from tests.soak.world import Side, World

MB = 1 << 20
LIMIT = 12 * MB
"""By how much a process may grow that keeps nothing: what allocators leave between live blocks."""
POOL = 8
"""Threads that an event loop may start for what blocks, and then keeps."""


class MemoryWatch:
    """Samples over the run; the first tenth is compared with the last."""

    def __init__(self, world: World) -> None:
        self.samples: list[tuple[int, int, int]] = []
        """Bytes of anonymous memory, threads, open files."""
        self.world = world
        self._whole = {side.name: side.engine.memory_report() for side in (world.own, world.shared)}

    def sample(self) -> None:
        """Look once; raises AssertionError where an engine holds what it never may."""
        for side in (self.world.own, self.world.shared):
            self._check(side)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.samples.append((anonymous(), threading.active_count(), len(os.listdir("/proc/self/fd"))))

    def verdict(self) -> tuple[str, bool]:
        """How the last tenth compares with the first, and whether it is flat."""
        each = max(1, len(self.samples) // 10)
        first = [median_low(column) for column in zip(*self.samples[:each], strict=True)]
        last = [median_low(column) for column in zip(*self.samples[-each:], strict=True)]
        grown = last[0] - first[0]
        words = (
            f"{first[0] / MB:.1f} -> {last[0] / MB:.1f} MB anonymous, {first[1]} -> {last[1]} threads, "
            f"{first[2]} -> {last[2]} files"
        )
        return words, grown <= LIMIT and last[1] <= first[1] + POOL and last[2] <= first[2]

    def _check(self, side: Side) -> None:
        whole, now = self._whole[side.name], side.engine.memory_report()
        for tag, kept in whole.items():
            _check_tag(side.name, tag, kept, now[tag])


def _check_tag(side: str, tag: str, kept: Any, now: Any) -> None:
    if tag == "untagged":
        assert now <= kept, f"{side}: {now} bytes untagged, {kept} at the start"
        return
    assert now["virtual"] == kept["virtual"], f"{side}: {tag} has {now}, had {kept}"
    assert now["mapped"] <= kept["mapped"] and now["host"] <= kept["mapped"], f"{side}: {tag} has {now}"


def anonymous() -> int:
    """Bytes of private memory of this process."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Anon:"):
            return int(line.split()[1]) * 1024
    raise OSError("this kernel's smaps_rollup lacks Pss_Anon")
