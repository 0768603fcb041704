"""How the CUDA driver is called, by a driver that forbids what the real one does."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tokenspeed_rl.errors import ConfigError, OutOfMemoryError
from tokenspeed_rl.memory import CudaMemory
from tokenspeed_rl.memory.cuda_driver import CudaDriverError

UNIT = 1 << 16
STRIPES = 3


def status(driver, name):
    return getattr(driver.CUresult, name)


def mapped_region(cuda, tag="weights"):
    region = cuda.reserve(tag, 2 * UNIT, STRIPES)
    region.map(UNIT)
    return region


def test_everything_is_given_back(driver, cuda):
    """A7: the books equal the driver's own counters; after close nothing is left in the driver."""
    region = mapped_region(cuda)
    assert driver.used == region.mapped == STRIPES * UNIT == cuda.total() - cuda.free()
    assert driver.accessible == set(driver.mapped)
    backup = cuda.save(region)
    assert list(driver.registered.values()) == [STRIPES * UNIT]
    region.unmap()
    assert driver.used == 0 == len(driver.handles) and len(driver.reserved) == 1
    region.map(2 * UNIT)
    backup.close()
    assert driver.registered == {}
    region.close()
    assert driver.leaks() == [] and driver.used == 0


def test_the_device_is_done_before_memory_goes(driver, cuda):
    """A step that still runs on the device never sees its memory taken away, nor is half of one saved."""
    region = mapped_region(cuda)
    region.bytes.fill_(1)
    for call in (region.unmap, lambda: cuda.save(region)):
        driver.calls.clear()
        call()
        sync = driver.calls.index("cuCtxSynchronize")
        assert all(
            driver.calls.index(name) > sync
            for name in ("cuMemUnmap", "cuMemHostRegister")
            if name in driver.calls
        )
        region.unmap()
        region.map(UNIT)
    driver.calls.clear()
    region.close()
    assert driver.calls.index("cuCtxSynchronize") < driver.calls.index("cuMemUnmap")


def test_every_failing_call_of_a_map_is_undone(driver, cuda):
    """A2: whichever driver call fails, mapped bytes are what they were before, and a retry works."""
    other = mapped_region(cuda, "kv_cache")
    region = cuda.reserve("weights", 2 * UNIT, STRIPES)
    before, used = cuda.usage(), driver.used
    region.map(UNIT)
    region.unmap()
    driver.calls.clear()
    region.map(UNIT)
    names = list(driver.calls)
    region.unmap()
    assert len(names) >= 3 * STRIPES
    peak = cuda.peak
    for code in ("CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_INVALID_VALUE"):
        for k, name in enumerate(names, 1):
            driver.fail_at, driver.fail_with = k, status(driver, code)
            if name == "cuCtxPopCurrent":
                continue  # the last resort of every way out: it can't be undone, nor does it take memory
            with pytest.raises((OutOfMemoryError, CudaDriverError)) as error:
                region.map(UNIT)
            assert driver.fail_at is None
            if isinstance(error.value, CudaDriverError):
                assert (error.value.call, error.value.code) == (name, status(driver, code))
                assert name in str(error.value) and code in str(error.value)
            else:
                assert error.value.wanted == STRIPES * UNIT and error.value.free == driver.capacity - used
            assert name != "cuMemCreate" or isinstance(error.value, OutOfMemoryError) == (
                code == "CUDA_ERROR_OUT_OF_MEMORY"
            )
            assert (cuda.usage(), driver.used, region.mapped) == (before, used, 0)
            assert len(driver.handles) == STRIPES and driver.contexts == []
    driver.fail_at = None
    region.map(UNIT)
    region.bytes[:, :UNIT] = 1
    assert cuda.peak == peak and other.mapped == STRIPES * UNIT


def test_a_device_that_promises_too_much(driver, cuda):
    """A1: when the device gives less than it says is free, both figures are named and no map remains."""
    region = cuda.reserve("weights", 2 * UNIT, STRIPES)
    real = driver._cuMemGetInfo
    driver.capacity = 2 * UNIT
    driver._cuMemGetInfo = lambda: (1 << 40, real()[1])
    with pytest.raises(OutOfMemoryError) as error:
        region.map(UNIT)
    assert (error.value.wanted, error.value.free) == (STRIPES * UNIT, 1 << 40)
    assert driver.used == 0 == len(driver.handles)


def test_what_torch_has_cached_goes_back_first(driver, cuda, monkeypatch):
    """A8: a trainer's allocator that caches everything, in segments of any kind, can't starve a wake."""
    region = cuda.reserve("weights", 2 * UNIT, STRIPES)

    def empty_cache() -> None:
        driver.capacity = STRIPES * UNIT

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    driver.capacity = STRIPES * UNIT - 1
    assert cuda.free() == STRIPES * UNIT, "what a cache is sized by"
    driver.capacity = STRIPES * UNIT - 1
    region.map(UNIT)
    assert region.mapped == STRIPES * UNIT


def test_a_failing_release_can_be_tried_again(driver, cuda):
    """Contract 5: whichever call of a release fails, the error names it, and the next release finishes."""
    region = mapped_region(cuda)
    driver.calls.clear()
    region.unmap()
    names = list(driver.calls)
    assert names.count("cuMemUnmap") == names.count("cuMemRelease") == STRIPES
    driver.fail_with = status(driver, "CUDA_ERROR_INVALID_VALUE")
    for k, name in enumerate(names, 1):
        region.map(UNIT)
        region.bytes[:, :UNIT] = 6
        if name == "cuCtxPopCurrent":
            break
        driver.fail_at = k
        with pytest.raises(CudaDriverError, match=f"{name} failed: CUDA_ERROR_INVALID_VALUE"):
            region.unmap()
        assert region.mapped == STRIPES * UNIT and driver.contexts == []
        if k <= 2:  # nothing was begun
            assert driver.used == region.mapped and region.bytes[:, :UNIT].unique().tolist() == [6]
        region.unmap()
        assert region.mapped == driver.used == 0 == len(driver.handles)


def test_an_undo_that_fails_is_made_up_for(driver, cuda):
    """A2: even where the driver fails twice in one map, no memory is lost and the retry works."""
    region = cuda.reserve("weights", 2 * UNIT, STRIPES)
    real, left = driver._cuMemSetAccess, [2]

    def fail(*args: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            driver.fail_at = 1  # the first call that undoes
            driver.capacity = 0
            driver._cuMemSetAccess = real
            driver._need(False, "full", status(driver, "CUDA_ERROR_OUT_OF_MEMORY"))
        real(*args)

    driver._cuMemSetAccess = fail
    with pytest.raises(OutOfMemoryError):
        region.map(UNIT)
    assert driver.used > 0 == region.mapped
    driver.capacity = 1 << 30
    region.map(UNIT)
    assert driver.used == region.mapped == STRIPES * UNIT
    region.close()
    assert driver.leaks() == []


@pytest.mark.parametrize("code", ["CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_INVALID_VALUE"])
def test_memory_that_cannot_be_pinned(driver, cuda, code):
    """A release whose backup can't be pinned fails with nothing changed and nothing kept."""
    region = mapped_region(cuda)
    driver.calls.clear()
    cuda.save(region).close()
    k = driver.calls.index("cuMemHostRegister") + 1
    driver.fail_at, driver.fail_with = k, status(driver, code)
    with pytest.raises((OutOfMemoryError, CudaDriverError)) as error:
        cuda.save(region)
    assert isinstance(error.value, OutOfMemoryError) == (code == "CUDA_ERROR_OUT_OF_MEMORY")
    assert driver.registered == {} and cuda.usage()["weights"].host == 0 and region.mapped == STRIPES * UNIT
    gc.collect()
    cuda.save(region).close()


def test_a_copy_that_fails_unpins(driver, cuda, monkeypatch):
    """A backup that breaks half way keeps no host memory, not even while its error is handled."""
    region = mapped_region(cuda)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", lambda *args: (_ for _ in ()).throw(RuntimeError("device lost")))
        with pytest.raises(RuntimeError, match="device lost"):
            cuda.save(region)
    assert driver.registered == {} and cuda.usage()["weights"].host == 0


def test_calls_leave_the_thread_its_context(driver, cuda):
    """The engine is a guest: a thread has the CUDA context it had, after errors too."""
    driver.contexts.append("the trainer's")
    region = mapped_region(cuda)
    backup = cuda.save(region)
    backup.restore()
    region.unmap()
    driver.capacity = 0
    with pytest.raises(OutOfMemoryError):
        region.map(UNIT)
    driver.capacity, driver.fail_at = 1 << 30, 9
    with pytest.raises(OutOfMemoryError):
        region.map(UNIT)
    backup.close()
    region.close()
    assert driver.contexts == ["the trainer's"]
    driver.contexts.clear()


def test_a_dead_context_is_left_alone(driver, cuda):
    """A9: objects that outlive the CUDA context, as at the end of the interpreter, die in silence."""
    region = mapped_region(cuda)
    backup = cuda.save(region)
    driver.dead = True
    driver.calls.clear()
    backup.close()
    del region, backup
    gc.collect()
    assert set(driver.calls) <= {"cuCtxPushCurrent"}


def test_a_forked_child_never_calls_the_driver(driver, cuda):
    """A8: a worker that drops the engine makes no CUDA call, which would fail or hang there."""
    script = """
import gc, os, sys, torch
from conftest import FakeDriver
from tokenspeed_rl.memory import CudaMemory
driver = FakeDriver()
memory = CudaMemory(torch.device("cpu", 0), driver)
region = memory.reserve("weights", 1 << 16)
region.map(1 << 16)
backup = memory.save(region)
calls = len(driver.calls)
child = os.fork()
if child == 0:
    backup.close()
    del region, backup
    gc.collect()
    sys.exit(len(driver.calls) - calls)
_, status = os.waitpid(child, 0)
assert status == 0, status
region.unmap()
"""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, env=env
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_what_is_missing_is_named(driver, monkeypatch):
    """Without cuda-bindings, or without an NVIDIA driver, the error says what to install or set."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(ConfigError, match="cuda-bindings") as error:
        CudaMemory(torch.device("cuda", 0))
    assert error.value.fix == 'pip install "tokenspeed_rl[cuda]"'

    def not_found(flags: int) -> None:
        raise RuntimeError("libcuda.so.1 is not there")

    driver._cuInit = not_found
    with pytest.raises(ConfigError, match=r"NVIDIA driver can't be loaded.*libcuda"):
        CudaMemory(torch.device("cuda", 0), driver)


def test_the_driver_refuses_a_device(driver):
    """A device that isn't there is an error that names the call and the code."""
    driver.fail_at, driver.fail_with = 2, status(driver, "CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(CudaDriverError, match=r"cuDeviceGet failed: CUDA_ERROR_INVALID_VALUE \(1\)") as error:
        CudaMemory(torch.device("cuda", 7), driver)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_a_device_without_an_index_is_the_current_one(driver, monkeypatch):
    """`device="cuda"` is whatever device torch would use here."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert CudaMemory(torch.device("cuda"), driver).device == torch.device("cuda", 0)
