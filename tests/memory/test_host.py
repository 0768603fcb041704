"""Host memory really goes back to the system: measured in processes of their own."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
from pathlib import Path
from weakref import WeakValueDictionary

import pytest
import torch

from tokenspeed_rl.errors import EngineStateError, OutOfMemoryError
from tokenspeed_rl.memory import HostMemory, anonymous, host
from tokenspeed_rl.memory.anonymous import PAGE, AnonymousBlock

MB = 1 << 20
MEASURE = """
import gc, os, sys
import torch
from tokenspeed_rl.memory import HostMemory

N = 200 << 20

def megabytes(pid="self"):
    # Private pages alone, each divided among the processes that keep it: it is free when none does.
    lines = open(f"/proc/{pid}/smaps_rollup").read().splitlines()
    sizes = {line.split()[0]: int(line.split()[1]) // 1024 for line in lines[1:]}
    return sizes["Pss_Anon:"]

memory = HostMemory()
region = memory.reserve("kv_cache", N // 4, stripes=4)
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that must end well, and silently."""
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, env=env
    )
    assert (result.returncode, result.stderr) == (0, ""), result
    return result


def test_unmapping_gives_the_memory_back():
    """A6: 200 MB fall by 200 MB, cycle for cycle; mapping alone takes nothing; a backup goes back too."""
    run(
        MEASURE
        + """
bottom = megabytes()
region.map(N // 4)
assert megabytes() < bottom + 10
for cycle in range(50):
    region.bytes[:, :: 4096 if cycle % 10 else 1] = 1
    if cycle % 10 == 0:
        assert bottom + 195 < megabytes() < bottom + 215, (bottom, megabytes())
    region.unmap()
    if cycle % 10 == 0:
        assert megabytes() < bottom + 10, (cycle, bottom, megabytes())
    region.map(N // 4)
assert megabytes() < bottom + 10, (bottom, megabytes())
region.bytes.fill_(3)
backup = memory.save(region)
assert megabytes() > bottom + 390
region.unmap()
assert megabytes() < bottom + 215
region.map(N // 4)
backup.restore()
backup.close()
assert bottom + 195 < megabytes() < bottom + 215
assert region.bytes[::3, ::4096].unique().tolist() == [3]
region.close()
assert megabytes() < bottom + 10
"""
    )


def test_a_forked_child_keeps_nothing_alive():
    """A8: with DataLoader workers that live on, a release frees; the parent's bytes survive their end."""
    run(
        MEASURE
        + """
both = lambda: megabytes() + megabytes(child)
region.map(N // 4)
region.bytes.fill_(7)
hears, wakes = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    os.close(wakes[1])  # so that the parent's end, whatever it is, ends this one too
    without = megabytes() < 195
    region.close()
    del region, memory
    gc.collect()  # must not unmap what lies at these addresses here
    os.write(hears[1], b"." if without else b"!")
    os.read(wakes[0], 1)
    sys.exit(0)
assert os.read(hears[0], 1) == b"."
full = both()
region.unmap()
assert both() < full - 190, (full, both())
region.map(N // 4)
region.bytes.fill_(5)
os.write(wakes[1], b".")
_, status = os.waitpid(child, 0)
assert status == 0, status
assert region.bytes[:, ::4096].unique().tolist() == [5]
"""
    )


def test_a_child_does_not_unmap_what_it_has_at_these_addresses():
    """A8: a worker that drops the engine leaves alone memory of its own that came to lie there."""
    run(
        """
import ctypes, mmap, os, sys
from tokenspeed_rl.memory.anonymous import AnonymousBlock, _libc

block = AnonymousBlock(1 << 20)
child = os.fork()
if child == 0:
    fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10
    address = _libc.mmap(block.address, 1 << 20, mmap.PROT_READ | mmap.PROT_WRITE, fixed, -1, 0)
    assert address == block.address
    ctypes.memset(address, 1, 1 << 20)
    del block
    assert ctypes.string_at(address, 3) == b"\\1\\1\\1"
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
"""
    )


@pytest.mark.parametrize(
    "kind", ["HostMemory()", "FakeVMM()", "CudaMemory(torch.device('cpu', 0), FakeDriver())"]
)
def test_the_interpreter_exits_in_any_state(kind):
    """A9: asleep, awake, with tensors and backups alive: exit code 0, no trace."""
    run(
        f"""
import sys, torch
from conftest import FakeDriver
from tokenspeed_rl.memory import CudaMemory, FakeVMM, HostMemory

memory = {kind}
asleep, awake, closed, lost = (memory.reserve("weights", 1 << 20) for _ in range(4))
for region in (asleep, awake, closed, lost):
    region.map(1 << 20)
views = [region.bytes[0, 5:].view(-1) for region in (asleep, awake, closed)]
backup, other = memory.save(awake), memory.save(asleep)
asleep.unmap()
closed.close()
sys.cycle = [backup, lost]
sys.cycle.append(sys.cycle)
"""
    )


@pytest.fixture
def alone(monkeypatch):
    """A machine with 100 MB free and no memory promised by what other tests may have left."""
    monkeypatch.setattr(host, "free_bytes", lambda device: 100 * MB)
    monkeypatch.setattr(host, "_blocks", WeakValueDictionary())


def test_memory_that_is_promised_is_not_free(alone):
    """A1: what is mapped but not yet touched is taken; the kernel would kill the process at the touch."""
    memory = HostMemory()
    first, second = memory.reserve("weights", 60 * MB), memory.reserve("kv_cache", 60 * MB)
    first.map(60 * MB)
    assert memory.free() == 40 * MB
    with pytest.raises(OutOfMemoryError) as error:
        second.map(60 * MB)
    assert (error.value.wanted, error.value.free) == (60 * MB, 40 * MB)
    first.bytes[0, : 20 * MB] = 1
    assert 60 * MB <= memory.free() <= 62 * MB  # up to a huge page may have come with the last touch
    second.map(60 * MB)
    assert memory.free() <= 2 * MB
    first.unmap()
    assert memory.free() == 40 * MB


def test_engines_of_one_process_do_not_promise_the_same_memory(alone):
    """A1: what one memory has promised, no other counts as free, until it is given back or lost."""
    one, other = HostMemory(), HostMemory()
    first, second = one.reserve("kv_cache", 80 * MB), other.reserve("kv_cache", 80 * MB)
    first.map(60 * MB)
    assert one.free() == other.free() == other.host_free() == 40 * MB
    with pytest.raises(OutOfMemoryError) as error:
        second.map(60 * MB)
    assert (error.value.wanted, error.value.free) == (60 * MB, 40 * MB)
    del error  # its traceback would hold the second's addresses
    second.map(30 * MB)
    assert one.free() == other.free() == 10 * MB
    first.unmap()
    assert one.free() == other.free() == 70 * MB
    second.bytes[:, : 30 * MB] = 1
    assert one.free() == 100 * MB  # touched: the system counts it from now on
    second.unmap()
    second.map(30 * MB)
    view = second.bytes[0, :1]
    second.close()
    assert one.free() == 70 * MB  # somebody could still touch it
    del view
    gc.collect()
    assert one.free() == 100 * MB


def test_memory_is_counted_while_other_threads_come_and_go(alone):
    """A1: engines start and end on any thread, in the middle of a count too."""
    ready = threading.Barrier(4)
    broken: list[BaseException] = []

    def come_and_go():
        try:
            ready.wait(20)
            for _ in range(300):
                region = HostMemory().reserve("weights", 2 * PAGE)
                region.map(PAGE)
                region.unmap()
                region.map(2 * PAGE)
                region.close()
        except BaseException as error:
            broken.append(error)

    threads = [threading.Thread(target=come_and_go) for _ in range(3)]
    for thread in threads:
        thread.start()
    memory = HostMemory()
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        ready.wait(20)
        while any(thread.is_alive() for thread in threads):
            assert 100 * MB - 6 * PAGE <= memory.free() <= 100 * MB
    finally:
        sys.setswitchinterval(switch)
        for thread in threads:
            thread.join(20)
    assert not broken and memory.free() == 100 * MB


def test_a_forked_child_has_promises_of_its_own_alone():
    """A8: an engine in a child counts neither the parent's promises nor pages that aren't there."""
    run(
        """
import os, sys, torch
from tokenspeed_rl.memory import HostMemory, host

host.free_bytes = lambda device: 100 << 20
parents = HostMemory().reserve("weights", 60 << 20)
parents.map(60 << 20)
child = os.fork()
if child == 0:
    memory = HostMemory()
    assert memory.free() == 100 << 20
    memory.reserve("weights", 30 << 20).map(30 << 20)
    region = memory.reserve("weights", 20 << 20)
    region.map(20 << 20)
    assert memory.free() == 80 << 20
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert HostMemory().free() == 40 << 20
"""
    )


def test_a_terabyte_of_addresses():
    """Addresses cost nothing: a stripe may be as long as the largest cache there could ever be."""
    memory = HostMemory()
    region = memory.reserve("kv_cache", 1 << 35, stripes=32)
    region.map(PAGE)
    data = region.bytes
    data[31, :PAGE] = 1
    assert region.virtual == 1 << 40 and data[31, PAGE - 1].item() == 1
    region.unmap()
    assert data.data_ptr() % PAGE == 0


def test_addresses_that_do_not_exist():
    """More than a process can have is refused with wanted and free bytes, not with a crash."""
    memory = HostMemory()
    with pytest.raises(OutOfMemoryError, match="addresses") as error:
        memory.reserve("kv_cache", 1 << 60)
    assert error.value.wanted == 1 << 60 and memory.usage()["kv_cache"].virtual == 0


def test_a_refusal_of_the_system_is_an_error(monkeypatch):
    """A call to the system that fails says so, and the region stays what it was."""
    memory = HostMemory()
    region = memory.reserve("weights", PAGE)
    region.map(PAGE)
    region.bytes.fill_(1)

    def refuse(address: int, nbytes: int, advice: int) -> int:
        ctypes.set_errno(22)
        return -1

    with monkeypatch.context() as patch:
        patch.setattr(anonymous._libc, "madvise", refuse)
        with pytest.raises(EngineStateError, match="madvise failed: Invalid argument"):
            region.unmap()
    assert region.mapped == PAGE and region.bytes.unique().tolist() == [1]
    region.unmap()
    assert region.mapped == 0


def test_pages_come_with_the_first_touch():
    """What is counted as untouched is exactly what no write has reached."""
    block = AnonymousBlock(10 * PAGE)
    spans = [(block.address, 4 * PAGE), (block.address + 5 * PAGE, 5 * PAGE)]
    assert anonymous.untouched(spans) == 9 * PAGE
    for page in (1, 4, 9):
        ctypes.memset(block.address + page * PAGE, 1, 1)
    assert anonymous.untouched(spans) == 7 * PAGE
    block.decommit(spans)
    assert anonymous.untouched(spans) == 9 * PAGE
    assert ctypes.string_at(block.address + 4 * PAGE, 1) == b"\1"


def test_nothing_of_the_process_is_changed():
    """The engine is a guest: default dtype, device and random state are what they were."""
    before = (torch.get_default_dtype(), torch.get_default_device(), torch.get_rng_state())
    memory = HostMemory()
    region = memory.reserve("weights", PAGE)
    region.map(PAGE)
    memory.save(region).close()
    after = (torch.get_default_dtype(), torch.get_default_device(), torch.get_rng_state())
    assert before[:2] == after[:2] and torch.equal(before[2], after[2])
