"""The device that tests of the engine run on notices every mistake."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_rl.errors import EngineStateError, OutOfMemoryError
from tokenspeed_rl.memory import TAGS, FakeVMM
from tokenspeed_rl.memory.fake import _reaches

PAGE = 4096


def floats(memory, tag="kv_cache", stripes=1, mapped=PAGE):
    region = memory.reserve(tag, 2 * PAGE, stripes)
    region.map(mapped)
    return region, region.bytes.view(torch.float32)


def test_released_memory_is_poison():
    """A row's vocabulary: release poisons, and so does a map, NaN in floats and -1 in integers."""
    region, data = floats(FakeVMM())
    assert data[0, : PAGE // 4].isnan().all()
    data[0, : PAGE // 4] = 1.0
    region.unmap()
    assert data[0, : PAGE // 4].isnan().all()
    assert (data.view(torch.int64)[0, : PAGE // 8] == -1).all()


def test_the_capacity_holds_across_regions():
    """A1: wanted and free bytes of the one device that all regions share; what was mapped stays."""
    memory = FakeVMM(capacity=3 * PAGE)
    first, second = memory.reserve("weights", 2 * PAGE), memory.reserve("kv_cache", 2 * PAGE)
    first.map(2 * PAGE)
    assert (memory.free(), memory.total()) == (PAGE, 3 * PAGE)
    with pytest.raises(OutOfMemoryError) as error:
        second.map(2 * PAGE)
    assert (error.value.wanted, error.value.free) == (2 * PAGE, PAGE)
    assert (first.mapped, second.mapped) == (2 * PAGE, 0)
    first.unmap()
    second.map(2 * PAGE)
    assert (memory.maps, memory.unmaps, memory.saves) == (2, 1, 0)


@pytest.mark.parametrize("k", range(1, 7))
def test_any_map_can_be_made_to_fail(k):
    """A2: the k-th map from now fails, that one alone, and the books are as before it."""
    memory = FakeVMM(fail_at=k)
    regions = [memory.reserve(tag, PAGE) for tag in TAGS] * 2
    for number, region in enumerate(regions, 1):
        region.unmap()
        before = memory.usage()
        if number == k:
            with pytest.raises(OutOfMemoryError, match="told to fail"):
                region.map(PAGE)
            assert memory.usage() == before and memory.fail_at is None
        region.map(PAGE)
    assert memory.maps == 6


def test_backups_are_counted():
    """A5: how many backups were made, and how many bytes of host memory they hold."""
    memory = FakeVMM(capacity=2 * PAGE)
    region, data = floats(memory, "weights", mapped=2 * PAGE)
    data.fill_(2.0)
    backup = memory.save(region)
    assert memory.saves == 1 and memory.usage()["weights"].host == 2 * PAGE
    region.unmap()
    region.map(2 * PAGE)
    backup.restore()
    assert (data == 2.0).all()
    backup.close()
    assert memory.usage()["weights"].host == 0


def test_the_guard_lets_mapped_memory_be_used():
    """Reads and writes within what is mapped, and views of anything, go through."""
    memory = FakeVMM()
    region, data = floats(memory, stripes=3)
    half = data[:, : PAGE // 4]
    with memory.guard():
        half.fill_(2.0)
        assert torch.equal(half, torch.full((3, PAGE // 4), 2.0))
        assert half.t()[5:9, 1:].sum().item() == 16.0
        assert half.view(3, 64, 16).transpose(0, 1).reshape(64, -1)[0, 0] == 2.0
        half[:, None].expand(3, 2, PAGE // 4).clone()
        assert half.index_select(0, torch.tensor([2])).shape == (1, PAGE // 4)
        data[:, PAGE // 4 :].view(3, -1)
        torch.zeros(0).copy_(data[:, :0].flatten()[:0])
    region.unmap()
    with memory.guard():
        view = data[1:].view(torch.uint8)[0, 7:]
        assert view.shape == (2 * PAGE - 7,)
        torch.ones(3).sum()


OPS = {
    "read": lambda data: data.sum(),
    "one": lambda data: data[0, 3].item(),
    "write": lambda data: data.fill_(1.0),
    "copy into": lambda data: data.copy_(torch.zeros(data.shape)),
    "copy out": lambda data: torch.empty(data.shape).copy_(data),
    "index": lambda data: data[torch.tensor([0])],
    "index write": lambda data: data.index_copy_(0, torch.tensor([0]), torch.zeros(1, data.shape[1])),
    "out": lambda data: torch.add(torch.zeros(data.shape), 1.0, out=data),
    "list": lambda data: torch.cat([torch.zeros(1, data.shape[1]), data]),
    "matmul": lambda data: data @ data.t(),
    "transposed": lambda data: data.t()[3:5].clone(),
    "other type": lambda data: data.view(torch.int32).max(),
    "keyword": lambda data: torch.nn.functional.linear(torch.zeros(1, data.shape[1]), weight=data),
    "inference": lambda data: torch.inference_mode()(lambda: data + 1)(),
    "parameter": lambda data: torch.nn.Parameter(data).sum(),
}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_the_guard_stops_what_touches_unmapped_memory(op):
    """Acceptance's FakeVMM: any use while unmapped raises, be it a read or a write, in whatever way."""
    memory = FakeVMM()
    region, data = floats(memory, stripes=3, mapped=2 * PAGE)
    data.fill_(1.0)
    with memory.guard():
        op(data)
    region.unmap()
    with memory.guard(), pytest.raises(EngineStateError, match=r"aten.*touches memory that isn't mapped"):
        op(data)
    region.map(2 * PAGE)
    with memory.guard():
        op(data)


def test_the_guard_sees_what_lies_beyond_the_mapped_part():
    """A cache that maps fewer pages than it reserved may not touch the rest, one element of it neither."""
    memory = FakeVMM()
    _, data = floats(memory, stripes=3)
    last, first = data[1, PAGE // 4 - 1 : PAGE // 4], data[1, PAGE // 4 : PAGE // 4 + 1]
    with memory.guard():
        last.fill_(1.0)
        for part in (first, data[1, :: PAGE // 4], data, data[:, PAGE // 4 - 1 : PAGE // 4 + 1]):
            with pytest.raises(EngineStateError):
                part.fill_(1.0)


def test_the_guard_is_its_threads_alone():
    """A trainer's thread that runs next to a guarded step is not judged, nor is anything afterwards."""
    memory = FakeVMM()
    region, data = floats(memory)
    region.unmap()
    result = []
    with memory.guard():
        thread = threading.Thread(target=lambda: result.append(data[0, 0].item()))
        thread.start()
        thread.join(30)
    assert len(result) == 1 and data[0, 0].isnan()


def test_the_guard_knows_tensors_of_closed_regions():
    """Tensors that outlive their region are good if it was mapped at the end."""
    memory = FakeVMM()
    mapped, kept = floats(memory)
    unmapped, lost = floats(memory)
    unmapped.unmap()
    mapped.close(), unmapped.close()
    with memory.guard():
        kept[0, : PAGE // 4].fill_(1.0)
        with pytest.raises(EngineStateError):
            lost[0, :1].fill_(1.0)


@given(
    start=st.integers(0, 30),
    dims=st.lists(st.tuples(st.integers(1, 12), st.integers(2, 4)), max_size=3),
    size=st.sampled_from([1, 2, 4]),
    holes=st.sets(st.integers(0, 80), max_size=12),
)
def test_strided_tensors_are_judged_by_their_elements(start, dims, size, holes):
    """Gaps between the rows of a view may be unmapped; its elements may not, however it is strided."""
    dims = sorted(((stride * size, n) for stride, n in dims), reverse=True)
    offsets = itertools.product(*([stride * i for i in range(n)] for stride, n in dims))
    touched = {start + sum(offset) + byte for offset in offsets for byte in range(size)}
    bad = bool(touched & holes)
    assert _reaches(start, dims, size, lambda low, high: any(low <= hole < high for hole in holes)) == bad
