"""How large the KV cache gets."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_rl.config import EngineConfig
from tokenspeed_rl.core import kv_sizing
from tokenspeed_rl.core.kv_sizing import KVSize, free_bytes, kv_size
from tokenspeed_rl.errors import OutOfMemoryError

CPU = torch.device("cpu")


def size(free: int, context: int = 1000, per_page: int = 100, **settings: object) -> KVSize:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_sizing, "free_bytes", lambda device: free)
        config = EngineConfig(**settings)  # type: ignore[arg-type]
        return kv_size(config, bytes_per_page=per_page, context=context, device=CPU)


def test_an_explicit_capacity_is_what_it_says() -> None:
    """`max_total_tokens` is neither clamped nor rounded down: so many tokens do fit, whatever is free."""
    assert size(0, max_total_tokens=160) == KVSize(10, 160)
    assert size(0, max_total_tokens=161) == KVSize(11, 161)
    assert size(0, context=16, max_running_requests=1, max_total_tokens=1600) == KVSize(100, 1600)


def test_a_share_of_free_memory_is_taken() -> None:
    """`mem_fraction` of what `reserve_bytes` leaves, in whole pages."""
    assert size(10_000, mem_fraction=0.5).pages == 50
    assert size(10_000, mem_fraction=0.5, reserve_bytes=4_050).pages == 29


def test_no_more_is_mapped_than_could_be_used() -> None:
    """A machine with much memory gives a small model no more than all running requests' full contexts."""
    small = size(10**9, context=17, max_running_requests=3)
    assert small.pages == 3 * 2


@pytest.mark.parametrize("reserve", [0, 950, 2000])
def test_no_room_is_an_error(reserve: int) -> None:
    """A1: where not even a page fits, wanted and free bytes are named."""
    with pytest.raises(OutOfMemoryError) as error:
        size(1000, per_page=501, reserve_bytes=reserve)
    assert (error.value.wanted, error.value.free) == (501, 1000)


@given(
    free=st.integers(0, 10**6),
    context=st.integers(1, 200),
    running=st.integers(1, 5),
    page_size=st.sampled_from([1, 16, 32]),
    total=st.none() | st.integers(1, 5000),
)
def test_whatever_is_accepted_fits_the_pages(
    free: int, context: int, running: int, page_size: int, total: int | None
) -> None:
    """F11: a request within the capacity and the context finds pages enough for itself."""
    settings = {"max_running_requests": running, "page_size": page_size, "max_total_tokens": total}
    try:
        found = size(free, context=context, **settings)
    except OutOfMemoryError:
        assert free * 0.5 < 100 and total is None
        return
    assert min(found.tokens, context) <= found.pages * page_size
    if total is None:
        assert found.pages * 100 <= free * 0.5


def test_free_memory_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free bytes of the CPU are at most what the machine has, and that where nothing else is known."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free_bytes(CPU) <= total
    monkeypatch.setattr(kv_sizing, "Path", lambda path: tmp_path / path[1:])
    assert free_bytes(CPU) == total


def test_the_limit_of_the_process_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container what is left of its limit is free, with what can be reclaimed; without one, all is."""
    stat = "anon 1\ninactive_file 250000\n"
    files = {"memory.max": "5000000\n", "memory.current": "4000000\n", "memory.stat": stat}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    monkeypatch.setattr(kv_sizing, "Path", lambda path: meminfo if path == "/proc/meminfo" else tmp_path)
    assert free_bytes(CPU) == 1_250_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(CPU) == 8_192_000
    for name in files:
        (tmp_path / name).unlink()
    assert free_bytes(CPU) == 8_192_000
