"""What may be handed in as new weights, and what is refused, by name, before anything is touched."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from safetensors.torch import save
from torch import nn
from torch.distributed.tensor import distribute_tensor

from tokenspeed_rl.errors import RequestError, WeightUpdateError
from tokenspeed_rl.requests import UpdateWeightFromDiskReqInput, UpdateWeightsFromTensorReqInput
from tokenspeed_rl.weights import WeightUpdate, check_update, flatten, randomise, read_tensors

TENSORS = {"a": torch.arange(3.0), "b": torch.ones(2, 2, dtype=torch.bfloat16)}


def read(**fields):
    return read_tensors(UpdateWeightsFromTensorReqInput(**fields))


WHOLE = {
    "mapping": lambda: {"named_tensors": TENSORS},
    "list": lambda: {"named_tensors": list(TENSORS.items())},
    "tuple of lists": lambda: {"named_tensors": tuple(map(list, TENSORS.items()))},
    "bucket": lambda: {"named_tensors": flatten(TENSORS)},
    "bucket by format": lambda: {"named_tensors": flatten(TENSORS), "load_format": "flattened_bucket"},
    "safetensors bytes": lambda: {"serialized_named_tensors": [save(TENSORS)]},
}
STREAMS = {
    "iterator": lambda: iter(TENSORS.items()),
    "generator": lambda: ((name, tensor) for name, tensor in TENSORS.items()),
    "items view": lambda: TENSORS.items(),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_whole_sets_are_lists(kind):
    """Contract 3: each form of a whole set gives its pairs, exactly."""
    incoming = read(**WHOLE[kind]())
    assert incoming.stream is None and dict(incoming.whole).keys() == TENSORS.keys()
    for name, tensor in incoming.whole:
        assert torch.equal(tensor, TENSORS[name]) and tensor.dtype == TENSORS[name].dtype


@pytest.mark.parametrize("kind", STREAMS)
def test_everything_else_iterable_is_a_stream(kind):
    """Contract 6: iterators are read as they come; nothing is read at the call."""
    incoming = read(named_tensors=STREAMS[kind]())
    assert incoming.whole is None
    assert [(name, tensor is TENSORS[name]) for name, tensor in incoming.stream] == [("a", True), ("b", True)]


def test_nothing_of_a_stream_is_read_ahead_or_kept():
    """E10: one tensor at a time: the last is free before the next is asked for."""
    alive: list[weakref.ref] = []

    def source():
        for i in range(5):
            assert all(ref() is None for ref in alive)
            tensor = torch.full((4,), float(i))
            alive.append(weakref.ref(tensor))
            yield f"w{i}", tensor
            del tensor

    stream = read(named_tensors=source()).stream
    assert alive == []
    for _, tensor in stream:
        del tensor
    assert len(alive) == 5


def test_each_rank_reads_its_own_bytes():
    """Contract 3: safetensors bytes, one per rank."""
    raws = [save({"a": torch.full((1,), float(rank))}) for rank in range(2)]
    obj = UpdateWeightsFromTensorReqInput(serialized_named_tensors=raws)
    assert [read_tensors(obj, rank=rank, ranks=2).whole[0][1].item() for rank in range(2)] == [0, 1]
    with pytest.raises(RequestError, match="must hold 1 "):
        read_tensors(obj)


RAW = save(TENSORS)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        RAW[:4],
        RAW[:-1],
        RAW + b"x",
        b"\xff" * 64,
        b"\x80\x04cos\nsystem\n(S'exit 1'\ntR.",
        RAW[:8] + b"x" + RAW[9:],
    ],
)
def test_damaged_bytes_are_refused(raw):
    """Never pickle, never a crash: damaged or foreign bytes are a clear error."""
    with pytest.raises(WeightUpdateError, match=r"serialized_named_tensors\[0\] is no intact"):
        read(serialized_named_tensors=[raw])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"named_tensors": TENSORS, "serialized_named_tensors": [RAW]},
        {"named_tensors": "model"},
        {"named_tensors": b"model"},
        {"named_tensors": torch.zeros(2, 2)},
        {"named_tensors": nn.Linear(1, 1)},
        {"named_tensors": 3},
        {"serialized_named_tensors": RAW},
        {"serialized_named_tensors": "x"},
        {"serialized_named_tensors": []},
        {"serialized_named_tensors": [RAW, RAW]},
        {"serialized_named_tensors": ["x"]},
        {"serialized_named_tensors": 3},
        {"named_tensors": TENSORS, "load_format": "flattened_bucket"},
        {"serialized_named_tensors": [RAW], "load_format": "flattened_bucket"},
        {"named_tensors": TENSORS, "load_format": "pickle"},
        {"named_tensors": TENSORS, "flush_cache": 1},
        {"named_tensors": TENSORS, "partial": None},
        {"named_tensors": TENSORS, "atomic": "no"},
        {"named_tensors": TENSORS, "weight_version": ""},
        {"named_tensors": TENSORS, "weight_version": 3},
        {"named_tensors": TENSORS, "timeout": 0},
        {"named_tensors": TENSORS, "timeout": -1.0},
        {"named_tensors": TENSORS, "timeout": float("inf")},
        {"named_tensors": TENSORS, "timeout": "1"},
    ],
    ids=str,
)
def test_bad_requests_are_refused(fields):
    """Every field is honoured or refused, with what it got and how to put it right."""
    with pytest.raises(RequestError) as caught:
        read(**fields)
    assert caught.value.fix


def test_update_requests_of_every_kind_are_checked():
    """Flags and labels of disk updates go through the same check."""
    check_update(UpdateWeightFromDiskReqInput(model_path="x", weight_version="v"))
    with pytest.raises(RequestError, match="flush_cache"):
        check_update(UpdateWeightFromDiskReqInput(model_path="x", flush_cache=0))


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (torch.zeros(2, 2), "item 1 is no .name, tensor. pair: a Tensor"),
        ("ab", "item 1 is no .name, tensor. pair"),
        (("a", torch.zeros(1), 3), "item 1 is no .name, tensor. pair"),
        ((3, torch.zeros(1)), "item 1 is no pair of a string"),
        (("a", [1.0]), "item 1 is no pair of a string"),
        ((torch.zeros(1), "a"), "item 1 is no pair of a string"),
        (None, "item 1 is no"),
    ],
)
def test_items_that_are_no_pairs_are_refused_by_position(item, message):
    """In a list at once, in a stream when it comes."""
    for make in (list, iter):
        with pytest.raises(WeightUpdateError, match=message):
            list(read(named_tensors=make([("a", torch.zeros(1)), item])).stream or ())


def resized(tensor, nbytes):
    """Its storage freed, as FSDP does, or cut short; shape and strides stay."""
    tensor.untyped_storage().resize_(nbytes)
    return tensor


UNFIT = {
    "integer": (torch.zeros(32, dtype=torch.int32), "torch.int32, not one of"),
    "8-bit float": (torch.zeros(32, dtype=torch.float8_e4m3fn), "torch.float8_e4m3fn, not one of"),
    "bool": (torch.zeros(32, dtype=torch.bool), "torch.bool"),
    "complex": (torch.zeros(32, dtype=torch.complex64), "torch.complex64"),
    "meta": (torch.zeros(32, device="meta"), "on the meta device"),
    "sparse": (torch.zeros(32).to_sparse(), r"torch.sparse_coo, not strided: pass its to_dense\(\)"),
    "freed": (resized(torch.zeros(32), 0), "without its memory"),
    "freed view": (resized(torch.zeros(40)[8:], 0), "without its memory"),
    "cut short": (resized(torch.zeros(32), 127), "without its memory"),
    "view cut short": (resized(torch.zeros(40)[8:], 159), "without its memory"),
    "strided view cut short": (resized(torch.zeros(63)[::2], 248), "without its memory"),
    "subclass": (torch.zeros(32).as_subclass(type("Own", (torch.Tensor,), {})), "a Own, not a plain tensor"),
}


@pytest.mark.parametrize("kind", UNFIT)
@pytest.mark.parametrize("whole", [True, False])
def test_unfit_tensors_are_refused_by_name(tiny, kind, whole):
    """E2: what is no plain float tensor is refused by name before it is written."""
    store = tiny.store(tiny.config())
    randomise(store, seed=0, std=0.02)
    tensor, message = UNFIT[kind]
    update = WeightUpdate(store, kind="tensor", partial=True)
    with pytest.raises(WeightUpdateError, match=f"1 unfit .unfit: model.norm.weight is {message}"):
        if whole:
            update.check_whole([("model.norm.weight", tensor)])
        else:
            update.claim("model.norm.weight", tensor)
    assert not update.wrote


FIT = {
    "exactly as long as its storage": resized(torch.ones(40)[:32], 128),
    "a strided view to the last byte": resized(torch.ones(64)[::2], 252),
    "one value for all": torch.ones(1).expand(32),
}


@pytest.mark.parametrize("kind", FIT)
def test_a_tensor_that_its_storage_just_holds_is_written(tiny, kind):
    """E2: only what really lies past the end of a storage is refused."""
    store = tiny.store(tiny.config())
    randomise(store, seed=0, std=0.02)
    store.weights["norm"][0].zero_()
    update = WeightUpdate(store, kind="tensor", partial=True)
    update.check_whole([("model.norm.weight", FIT[kind])])
    update.run([("model.norm.weight", FIT[kind])])
    update.commit()
    assert store.weights["norm"][0].tolist() == [1.0] * 32


def test_a_sharded_tensor_is_refused_with_the_fix(tiny):
    """E2: a DTensor would be one rank's share: pass the full tensor."""
    store = tiny.store(tiny.config())
    randomise(store, seed=0, std=0.02)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        sharded = distribute_tensor(torch.ones(32), mesh)
        for tensor in (sharded, nn.Parameter(sharded)):
            with pytest.raises(WeightUpdateError, match=r"is a DTensor, .*: pass its full_tensor\(\)"):
                WeightUpdate(store, kind="tensor", partial=True).claim("model.norm.weight", tensor)
        del sharded, tensor
        gc.collect()
    finally:
        torch.distributed.destroy_process_group()
