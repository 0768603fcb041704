"""How much memory there is and can be had."""

import os
from pathlib import Path

import pytest
import torch

from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.memory import HostMemory, free, free_bytes, memory_for, total_bytes

CPU = torch.device("cpu")
INSTALLED = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_free_memory_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free bytes of the CPU are at most what the machine has, and that where nothing else is known."""
    assert 0 < free_bytes(CPU) <= total_bytes(CPU) <= INSTALLED
    monkeypatch.setattr(free, "Path", lambda path: tmp_path / path[1:])
    assert free_bytes(CPU) == total_bytes(CPU) == INSTALLED


def test_the_limit_of_the_process_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container what is left of its limit is free, with what can be reclaimed; without one, all is."""
    stat = "anon 1\ninactive_file 250000\n"
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    files = {"memory.max": "5000000\n", "memory.current": "4000000\n", "memory.stat": stat}
    for name, content in files.items():
        (group / name).write_text(content)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    monkeypatch.setattr(free, "Path", lambda path: tmp_path / path[1:])
    assert (free_bytes(CPU), total_bytes(CPU)) == (1_250_000, 5_000_000)
    (group / "memory.max").write_text("max\n")
    assert (free_bytes(CPU), total_bytes(CPU)) == (8_192_000, INSTALLED)
    for name in files:
        (group / name).unlink()
    assert (free_bytes(CPU), total_bytes(CPU)) == (8_192_000, INSTALLED)


def test_the_memory_of_a_device() -> None:
    """An engine's device decides whose memory it releases; one that no engine runs on is refused."""
    assert isinstance(memory_for(CPU), HostMemory)
    with pytest.raises(ConfigError, match="meta"):
        memory_for(torch.device("meta"))
