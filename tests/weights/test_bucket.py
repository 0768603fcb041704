"""Buckets hold exactly what was put in, one at a time, and believe nothing of a layout from outside."""

from __future__ import annotations

import json
import random
import weakref
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_rl.errors import RequestError, TokenSpeedError, WeightUpdateError
from tokenspeed_rl.weights import FlattenedBucket, flatten
from tokenspeed_rl.weights.bucket import LAYOUT_LIMIT, buckets, decode_layout, encode_layout, layout_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = st.lists(st.integers(0, 5), max_size=3)


def make(shape, dtype, strides: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if strides == "every other":
        return torch.randn((*shape, 2), generator=generator, dtype=torch.float64).to(dtype)[..., 1]
    tensor = torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)
    return tensor.permute(list(reversed(range(tensor.dim())))) if strides == "transposed" else tensor


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


NAMED = st.lists(
    st.tuples(SHAPES, st.sampled_from(DTYPES), st.sampled_from(["plain", "every other", "transposed"])),
    max_size=8,
)


def same(found, expected) -> None:
    found, expected = list(found), list(expected)
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (_, view), (_, tensor) in zip(found, expected, strict=True):
        assert view.dtype == tensor.dtype and view.shape == tensor.shape and view.is_contiguous()
        assert torch.equal(view, tensor)


@settings(max_examples=80)
@given(NAMED, st.integers(0, 100))
def test_flatten_and_back_is_exact(kinds, seed):
    """E5: strided, 0-dim, empty, odd sizes, four float dtypes in one bucket: bit for bit, as views."""
    named = [(f"w{i}", make(*kind, seed + i)) for i, kind in enumerate(kinds)]
    bucket = flatten(iter(named))
    same(bucket.tensors(), named)
    start, end = bucket.data.data_ptr(), bucket.data.data_ptr() + bucket.data.nbytes
    for _, view in bucket.tensors():
        assert view.numel() == 0 or start <= view.data_ptr() <= end - view.nbytes
    assert layout_bytes(bucket.layout) == bucket.data.numel()


@settings(max_examples=80)
@given(NAMED, st.integers(1, 300), st.integers(0, 100))
def test_any_bucket_size_gives_the_same_tensors(kinds, bucket_bytes, seed):
    """E1: whatever the size: every tensor once, in order; only a larger tensor exceeds it, and is alone."""
    named = [(f"w{i}", make(*kind, seed + i)) for i, kind in enumerate(kinds)]
    found = list(buckets(iter(named), bucket_bytes))
    same([pair for bucket in found for pair in bucket.tensors()], named)
    for bucket in found:
        sizes = [place.nbytes for place in bucket.layout if place.nbytes]
        assert bucket.layout and (bucket.data.numel() <= bucket_bytes or len(sizes) == 1)


@settings(max_examples=50)
@given(NAMED)
def test_a_layout_survives_its_journey(kinds):
    """Contract 6: the layout travels as JSON; the other end reads the same tensors out of the same bytes."""
    bucket = flatten([(f"w{i}", make(*kind, i)) for i, kind in enumerate(kinds)])
    layout = decode_layout(encode_layout(bucket.layout), bucket.data.numel())
    assert layout == bucket.layout
    same(FlattenedBucket(bucket.data.clone(), layout).tensors(), bucket.tensors())


def test_one_bucket_and_one_tensor_are_held_at_a_time():
    """E10: an iterator's tensors die as they are packed, a bucket as the caller drops it."""
    alive: list[weakref.ref] = []
    most = 0

    def source():
        nonlocal most
        for i in range(12):
            tensor = torch.full((100,), float(i))
            alive.append(weakref.ref(tensor))
            yield f"w{i}", tensor
            del tensor
            most = max(most, sum(ref() is not None for ref in alive))

    held: list[weakref.ref] = []
    for bucket in buckets(source(), 1600):
        assert all(ref() is None for ref in held)
        held.append(weakref.ref(bucket.data))
        del bucket
    assert len(held) == 3 and most <= 1 and all(ref() is None for ref in [*alive, *held])


def test_buckets_are_made_as_they_are_asked_for():
    """Contract 6: lazy: the first bucket comes after as many tensors as it takes, and one more."""
    read = []

    def source():
        for i in range(100):
            read.append(i)
            yield f"w{i}", torch.zeros(100)

    first = next(buckets(source(), 800))
    assert len(first.layout) == 2 and read == [0, 1, 2]


def test_the_sources_may_change_afterwards():
    """E11: a bucket is a copy: what the sender does to its tensors later isn't seen."""
    tensor = torch.ones(3)
    bucket = flatten({"w": tensor})
    tensor.zero_()
    assert bucket.tensors()[0][1].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ([("w", torch.zeros(2, dtype=torch.int64))], "w is torch.int64"),
        ([("w", torch.zeros(2, device="meta"))], "w is on the meta device"),
        ([("w", torch.eye(2).to_sparse())], "w is torch.sparse_coo"),
        ([("v", torch.zeros(2)), ("w", freed(torch.zeros(2)))], "w is without its memory"),
        ([("w", torch.zeros(2)), ("w", torch.ones(2))], "given twice"),
        ([("w", 3)], "item 0 is no pair"),
        ([("a", torch.zeros(1)), torch.zeros(2, 2)], "item 1 is no"),
    ],
)
def test_what_can_be_no_weight_is_refused_by_name(named, message):
    """A bucket is refused where it is made, not at the receiver."""
    for make_it in (flatten, lambda pairs: list(buckets(pairs, 100))):
        with pytest.raises(WeightUpdateError, match=message):
            make_it(named)


def test_data_that_was_freed_is_no_bucket():
    """Bytes that aren't there can't be read: refused when the bucket is made, and when it is read."""
    data = torch.zeros(8, dtype=torch.uint8)
    bucket = FlattenedBucket(data, [("w", torch.float32, (2,), 0)])
    freed(data)
    with pytest.raises(WeightUpdateError, match="memory of a bucket's data was freed"):
        bucket.tensors()
    with pytest.raises(WeightUpdateError, match="have values"):
        FlattenedBucket(data, [("w", torch.float32, (2,), 0)])
    assert FlattenedBucket(freed(torch.zeros(0, dtype=torch.uint8)), []).tensors() == []


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_buckets_are_ordinary_tensors(mode):
    """Architecture, manners: made under inference mode, autograd works on them all the same."""
    with mode():
        bucket, *more = [flatten({"w": torch.ones(3)}), *buckets({"w": torch.ones(3)}, 4)]
        views = [tensor for each in (bucket, *more) for _, tensor in each.tensors()]
    for view in (bucket.data, *views):
        assert not view.is_inference() and not view.requires_grad
    weight = torch.ones(3, requires_grad=True)
    with torch.enable_grad():
        (weight * views[0]).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [1, 1, 1]


@pytest.mark.parametrize("size", [0, -1, 1.5, True, None])
def test_a_bucket_size_is_a_positive_integer(size):
    """Refused at the call, not at the first bucket."""
    with pytest.raises(RequestError, match="bucket_bytes"):
        buckets([], size)


F = torch.float32


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ([("a", F, (2,), 0), ("a", F, (2,), 8)], "given twice"),
        ([("a", F, (2,), 0), ("b", F, (2,), 4)], "before 8 where another ends"),
        ([("a", F, (4,), 4)], "ends at byte 20 of 16"),
        ([("a", F, (0,), 17)], "ends at byte 17"),
        ([("a", F, (1,), 2)], "unaligned"),
        ([("a", F, (-1,), 0)], "shape"),
        ([("a", F, (1,), -4)], "offset"),
        ([("a", F, (True,), 0)], "shape"),
        ([("a", F, (1.0,), 0)], "shape"),
        ([("a", F, 4, 0)], "shape"),
        ([("a", F, "4", 0)], "shape"),
        ([("a", F, (0, 2**40, 2**40), 0)], "shape"),
        ([("a", torch.int8, (1,), 0)], "int8"),
        ([("a", "float32", (1,), 0)], "float32"),
        ([(3, F, (1,), 0)], "no name"),
        ([("a", F, (1,))], "no list"),
        ({"a": 1}, "no list"),
        (None, "no list"),
    ],
)
def test_a_bucket_with_a_wrong_layout_is_refused(layout, message):
    """Overlaps, bounds, dtypes and shapes: a clear error instead of somebody else's bytes."""
    with pytest.raises(WeightUpdateError, match=message):
        FlattenedBucket(torch.zeros(16, dtype=torch.uint8), layout)


@pytest.mark.parametrize(
    "data",
    [torch.zeros(4), torch.zeros(2, 2, dtype=torch.uint8), b"1234", torch.zeros(8, dtype=torch.uint8)[::2]],
)
def test_data_must_be_flat_bytes(data):
    """A bucket is [nbytes] uint8, contiguous."""
    with pytest.raises(WeightUpdateError, match="data must be"):
        FlattenedBucket(data, [])


def test_a_slice_of_a_larger_buffer_is_a_bucket_where_it_is_aligned():
    """Several buckets in one receive buffer: views into it, refused where no view is legal."""
    whole = torch.arange(64, dtype=torch.uint8)
    ((_, view),) = FlattenedBucket(whole[8:24], [("a", torch.float64, (2,), 0)]).tensors()
    assert view.data_ptr() == whole.data_ptr() + 8
    with pytest.raises(WeightUpdateError, match="unaligned"):
        FlattenedBucket(whole[4:20], [("a", torch.float64, (2,), 0)])


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"{}",
        b"null",
        b"[1]",
        b'[["a","float32",[1]]]',
        b'[["a","float31",[1],0]]',
        b'[["a",["float32"],[1],0]]',
        b'[["a","int8",[1],0]]',
        b'[["a","float32",[1.0],0]]',
        b'[["a","float32",[true],0]]',
        b'[["a","float32",[-1],0]]',
        b'[["a","float32",{"0":1},0]]',
        b'[["a","float32",[1],"0"]]',
        b'[["a","float32",[1],NaN]]',
        b'[["a","float32",[17],0]]',
        b'[["a","float32",[1],0],["a","float32",[1],4]]',
        b'[["a","float32",[2],0],["b","float32",[1],4]]',
        b'[[null,"float32",[1],0]]',
        b'[["a","float32",[1],' + b"9" * 5000 + b"]]",
        b'[["a","float32",[' + b"1," * 100 + b"1],0]]",
        b"[" * 100_000,
        b" " * (LAYOUT_LIMIT + 1),
    ],
)
def test_a_damaged_layout_is_a_clear_error(raw):
    """Nothing that another process sends can be executed, read out of bounds or crash the receiver."""
    with pytest.raises(WeightUpdateError, match="layout of a bucket is damaged") as caught:
        decode_layout(raw, 64)
    assert len(str(caught.value)) < 600


def test_random_damage_reads_as_a_layout_or_is_refused():
    """Bytes changed anywhere: either a layout within bounds comes out, or a typed error."""
    bucket = flatten([(f"model.layers.{i}.w", torch.zeros(i, 3)) for i in range(6)])
    raw = encode_layout(bucket.layout)
    draw = random.Random(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(raw)
        for _ in range(draw.randint(1, 3)):
            damaged[draw.randrange(len(raw))] = draw.randrange(256)
        try:
            layout = decode_layout(bytes(damaged), bucket.data.numel())
            assert layout_bytes(layout) <= bucket.data.numel()
            FlattenedBucket(bucket.data, layout).tensors()
        except TokenSpeedError:
            refused += 1
    assert 0 < refused < 400


def test_a_layout_too_long_to_read_is_not_written():
    """The sender is told; the receiver never meets it."""
    layout = [(f"{'x' * 1000}{i}", torch.float32, (0,), 0) for i in range(LAYOUT_LIMIT // 1000 + 1)]
    with pytest.raises(RequestError, match="smaller buckets"):
        encode_layout(FlattenedBucket(torch.zeros(0, dtype=torch.uint8), layout).layout)


def test_the_encoding_is_plain_json():
    """Contract 6: length-bounded JSON, so that any sender can write it."""
    bucket = flatten([("a", torch.zeros(2, 3, dtype=torch.bfloat16)), ("b", torch.zeros(()))])
    rows = json.loads(encode_layout(bucket.layout))
    assert rows == [["a", "bfloat16", [2, 3], 0], ["b", "float32", [], 16]]
    assert list(islice((view.shape for _, view in bucket.tensors()), 2)) == [(2, 3), ()]
