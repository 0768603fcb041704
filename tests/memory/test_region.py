"""What every memory promises, whatever it is made of."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from tokenspeed_rl.errors import ConfigError, EngineStateError, OutOfMemoryError
from tokenspeed_rl.memory import TAGS, Usage
from tokenspeed_rl.memory.base import BlockMemory

NOTHING = dict.fromkeys(TAGS, Usage(0, 0, 0))
SIZE = 1 << 17  # whole units of all three


def unit(bench) -> int:
    assert isinstance(bench.memory, BlockMemory)
    return bench.memory.unit


def test_reserving_takes_addresses_alone(bench):
    """Contract 5: virtual bytes are counted apart from mapped ones, and nothing can be touched yet."""
    region = bench.memory.reserve("kv_cache", SIZE + 1, stripes=3)
    assert region.stripe_bytes == SIZE + unit(bench) and region.stripes == 3
    assert (region.virtual, region.mapped) == (3 * region.stripe_bytes, 0)
    assert bench.memory.usage() == NOTHING | {"kv_cache": Usage(0, region.virtual, 0)}
    with pytest.raises(EngineStateError, match="kv_cache has no memory"):
        _ = region.bytes
    assert bench.memory.peak == 0


def test_addresses_live_on(bench):
    """Contract 5: views made once are good after every cycle, A11: pointers too; old bytes are gone."""
    region = bench.memory.reserve("weights", SIZE)
    region.map(SIZE)
    everything = region.bytes
    view = everything[0, 64:128].view(torch.float32)
    view.fill_(3.5)
    address = view.data_ptr()
    region.unmap()
    assert region.mapped == 0
    with pytest.raises(EngineStateError):
        _ = region.bytes
    region.map(SIZE)
    assert region.bytes.data_ptr() == everything.data_ptr() and view.data_ptr() == address
    assert not (view == 3.5).any()
    view.copy_(torch.arange(16))
    assert region.bytes[0, 64:128].view(torch.float32).tolist() == list(range(16))


def test_made_under_inference_mode_a_region_is_ordinary(bench):
    """Architecture, manners: whoever asks first, autograd works on what lies in a region."""
    region = bench.memory.reserve("weights", SIZE)
    with torch.inference_mode():
        region.map(SIZE)
        data = region.bytes
        data[0, :64].fill_(3)
        backup = bench.memory.save(region)
        data[0, :64].fill_(0)
    backup.restore()
    assert not data.is_inference() and not region.bytes[0].is_inference()
    weight = torch.ones(64, requires_grad=True)
    (weight * data[0, :64]).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [3.0] * 64


def test_the_beginning_of_every_stripe_is_mapped(bench):
    """The KV cache maps as many pages of each layer as fit, in layers at fixed addresses."""
    region = bench.memory.reserve("kv_cache", 4 * SIZE, stripes=3)
    region.map(SIZE + 1)
    each = SIZE + unit(bench)
    assert region.mapped == 3 * each == bench.memory.usage()["kv_cache"].mapped
    data = region.bytes
    assert data.shape == (3, 4 * SIZE) and data.dtype == torch.uint8 and data.is_contiguous()
    for stripe in range(3):
        data[stripe, :each] = stripe + 1
    assert [data[i, :each].unique().tolist() for i in range(3)] == [[1], [2], [3]]
    region.unmap()
    region.map(4 * SIZE)
    assert region.mapped == region.virtual
    data.fill_(7)
    assert data.sum(dtype=torch.int64).item() == 7 * region.virtual


def test_fifty_cycles_leave_everything_as_it_was(bench):
    """A6: mapped bytes are constant over 50 cycles, A7: the books say what the regions do."""
    regions = [bench.memory.reserve(tag, SIZE, 2) for tag in TAGS]
    for _ in range(50):
        for region in regions:
            region.map(SIZE)
        assert bench.memory.usage() == {tag: Usage(2 * SIZE, 2 * SIZE, 0) for tag in TAGS}
        for region in regions:
            region.unmap()
    assert bench.memory.usage() == {tag: Usage(0, 2 * SIZE, 0) for tag in TAGS}
    assert bench.memory.peak == 6 * SIZE


def test_the_peak_is_of_one_moment(bench):
    """A3: what was mapped one after the other doesn't add up."""
    weights, kv = bench.memory.reserve("weights", SIZE), bench.memory.reserve("kv_cache", SIZE)
    weights.map(SIZE)
    weights.unmap()
    kv.map(unit(bench))
    assert bench.memory.peak == SIZE


def test_a_region_of_nothing(bench):
    """A tag that an engine has nothing of goes through every call."""
    region = bench.memory.reserve("cuda_graph", 0)
    region.map(0)
    assert region.bytes.shape == (1, 0) and region.bytes.data_ptr() == 0
    backup = bench.memory.save(region)
    region.unmap()
    region.map(0)
    backup.restore()
    backup.close()
    region.close()
    del region, backup
    assert bench.memory.usage() == NOTHING


def test_mapping_nothing_of_a_region(bench):
    """A KV cache of no pages has no memory."""
    region = bench.memory.reserve("kv_cache", SIZE)
    region.map(0)
    assert region.mapped == 0 == bench.memory.peak
    region.unmap()
    region.map(SIZE)
    assert region.mapped == SIZE


def test_bad_input_changes_nothing(bench):
    """Accepted arguments are honoured, others refused with what, got and fix."""
    with pytest.raises(ConfigError, match="weights"):
        bench.memory.reserve("weight", SIZE)
    for stripe_bytes, stripes in [(-1, 1), (SIZE, 0), (SIZE, -2)]:
        with pytest.raises(ConfigError):
            bench.memory.reserve("weights", stripe_bytes, stripes)
    assert bench.memory.usage() == NOTHING
    region = bench.memory.reserve("weights", SIZE)
    for nbytes in (-1, SIZE + 1):
        with pytest.raises(EngineStateError, match="bytes"):
            region.map(nbytes)
        assert region.mapped == 0
    region.map(SIZE)
    region.bytes.fill_(9)
    with pytest.raises(EngineStateError, match="already"):
        region.map(SIZE)
    assert region.mapped == SIZE and region.bytes.unique().tolist() == [9]
    region.unmap()
    region.unmap()
    assert region.mapped == 0


def test_too_little_memory(bench):
    """A1: wanted and free bytes are named, nothing changes; once there is room, the call works."""
    first, second = bench.memory.reserve("weights", SIZE), bench.memory.reserve("kv_cache", SIZE, 2)
    first.map(SIZE)
    first.bytes.fill_(5)
    bench.leave(2 * SIZE - 1)
    before = bench.memory.usage()
    with pytest.raises(OutOfMemoryError) as error:
        second.map(SIZE)
    assert (error.value.wanted, error.value.free) == (2 * SIZE, 2 * SIZE - 1)
    assert bench.memory.free() == 2 * SIZE - 1
    assert bench.memory.usage() == before and second.mapped == 0
    bench.leave(2 * SIZE)
    second.map(SIZE)
    second.bytes.fill_(6)
    assert first.bytes.unique().tolist() == [5] and second.bytes.unique().tolist() == [6]
    assert second.mapped <= bench.memory.total()


def test_a_closed_region_outlives_its_owner_in_its_tensors(bench):
    """Contract 6: memory that a trainer's tensors lie in stays theirs when the engine is gone."""
    region = bench.memory.reserve("weights", SIZE)
    region.map(SIZE)
    kept = region.bytes[0, :4096].view(torch.float32)
    region.close()
    region.close()
    region.unmap()
    with pytest.raises(EngineStateError, match="closed"):
        region.map(1)
    with pytest.raises(EngineStateError, match="closed"):
        _ = region.bytes
    del region
    gc.collect()
    assert bench.memory.usage()["weights"] == Usage(SIZE, SIZE, 0)
    kept.fill_(1.5)
    assert kept.sum().item() == 1.5 * 1024
    del kept
    assert bench.memory.usage() == NOTHING


def test_a_forgotten_region_is_given_back(bench):
    """An engine that is dropped without a shutdown keeps no memory."""
    region = bench.memory.reserve("weights", SIZE, 2)
    region.map(SIZE)
    region.bytes.fill_(1)
    del region
    assert bench.memory.usage() == NOTHING


def test_a_backup_brings_everything_back(bench):
    """A5: the bytes come back bit for bit, and no host memory is left when the backup is closed."""
    region = bench.memory.reserve("weights", 2 * SIZE, 3)
    region.map(SIZE)
    data = region.bytes
    noise = torch.randint(0, 256, (3, SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data[:, :SIZE] = noise
    backup = bench.memory.save(region)
    assert bench.memory.usage()["weights"] == Usage(3 * SIZE, 6 * SIZE, 3 * SIZE)
    assert bench.memory.peak == 3 * SIZE
    for _ in range(2):
        region.unmap()
        assert bench.memory.usage()["weights"] == Usage(0, 6 * SIZE, 3 * SIZE)
        region.map(SIZE)
        backup.restore()
        assert torch.equal(data[:, :SIZE], noise)
    backup.close()
    backup.close()
    assert bench.memory.usage()["weights"] == Usage(3 * SIZE, 6 * SIZE, 0)
    with pytest.raises(EngineStateError, match="closed"):
        backup.restore()
    assert torch.equal(data[:, :SIZE], noise)


def test_a_backup_fits_what_it_was_made_of(bench):
    """A restore into less, more or nothing is refused, and can be done right afterwards."""
    region = bench.memory.reserve("weights", 2 * SIZE)
    with pytest.raises(EngineStateError, match="no memory"):
        bench.memory.save(region)
    region.map(SIZE)
    region.bytes[:, :SIZE] = 4
    backup = bench.memory.save(region)
    region.unmap()
    with pytest.raises(EngineStateError, match="not mapped as it was"):
        backup.restore()
    region.map(2 * SIZE)
    region.bytes.fill_(8)
    with pytest.raises(EngineStateError, match="not mapped as it was"):
        backup.restore()
    assert region.bytes.unique().tolist() == [8]
    region.unmap()
    region.map(SIZE)
    backup.restore()
    assert region.bytes[:, :SIZE].unique().tolist() == [4]
    with pytest.raises(EngineStateError, match="of this memory"):
        type(bench.memory).save(bench.memory, object())


def test_no_host_memory_for_a_backup(bench, monkeypatch):
    """A release whose backup has no room fails before anything is changed."""
    region = bench.memory.reserve("weights", SIZE)
    region.map(SIZE)
    region.bytes.fill_(2)
    monkeypatch.setattr(type(bench.memory), "host_free", lambda self: SIZE - 1)
    before = bench.memory.usage()
    with pytest.raises(OutOfMemoryError) as error:
        bench.memory.save(region)
    assert (error.value.wanted, error.value.free) == (SIZE, SIZE - 1)
    assert bench.memory.usage() == before and region.bytes.unique().tolist() == [2]


def test_a_forgotten_backup_is_given_back(bench):
    """A5: no way of losing a backup keeps its memory."""
    region = bench.memory.reserve("weights", SIZE)
    region.map(SIZE)
    backup = bench.memory.save(region)
    del backup
    assert bench.memory.usage()["weights"].host == 0


def test_the_books_can_be_read_at_any_time(bench):
    """Contract 5: a memory report is a snapshot, from any thread, while another maps and unmaps."""
    region = bench.memory.reserve("kv_cache", SIZE, 2)
    stop, seen, started = threading.Event(), set(), threading.Event()

    def read() -> None:
        while not stop.is_set():
            seen.add(bench.memory.usage()["kv_cache"])
            started.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert started.wait(30)
    try:
        for _ in range(100):
            region.map(SIZE)
            extra = bench.memory.reserve("weights", SIZE)
            extra.close()
            region.unmap()
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive()
    assert seen <= {Usage(0, 2 * SIZE, 0), Usage(2 * SIZE, 2 * SIZE, 0)}
