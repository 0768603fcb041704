"""Many named tensors in one flat piece of memory, and the description that travels with it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_rl.errors import RequestError, WeightUpdateError
from tokenspeed_rl.sampling_params import check_integer
from tokenspeed_rl.weights.plain import FLOATS, check_pair, fault_of, lacks_memory

ALIGNMENT = 16
"""Bytes: every tensor of a bucket starts at a multiple, so that a view of any dtype is legal and fast."""
LAYOUT_LIMIT = 1 << 24
"""Most bytes that an encoded layout may have."""
_NAMES = {dtype: name for name, dtype in FLOATS.items()}
_MAX_RANK = 16
_MAX_SIZE = 1 << 62


class Placement(NamedTuple):
    """Where one tensor lies in a bucket: its bytes start at `offset`, contiguous."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, init=False, eq=False)
class FlattenedBucket:
    """Named tensors of several float dtypes in one block of bytes.

    Args:
        data: [nbytes] uint8, contiguous, on any device. It is held, not copied.
        layout: (name, dtype, shape, offset in bytes) of each tensor, in any order.

    Raises:
        WeightUpdateError: a layout that doesn't fit the data: names given twice, tensors that overlap, lie
            outside or start where their dtype can't.
    """

    data: Tensor
    layout: tuple[Placement, ...]

    def __init__(self, data: Tensor, layout: Sequence[tuple[str, torch.dtype, Sequence[int], int]]) -> None:
        if not isinstance(data, Tensor) or data.dtype is not torch.uint8 or data.dim() != 1:
            got = f"{data.dtype} {list(data.shape)}" if isinstance(data, Tensor) else type(data).__name__
            raise WeightUpdateError(f"a bucket's data must be a uint8 tensor [nbytes], not {got}")
        if not data.is_contiguous() or data.device.type == "meta" or lacks_memory(data):
            raise WeightUpdateError("a bucket's data must be contiguous, and have values")
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "layout", _checked(layout, data.numel(), int(data.storage_offset())))

    def tensors(self) -> list[tuple[str, Tensor]]:
        """(name, view into `data`) of every tensor, in the layout's order.

        Raises:
            WeightUpdateError: the memory of `data` was freed meanwhile.
        """
        if lacks_memory(self.data):
            raise WeightUpdateError(
                "the memory of a bucket's data was freed", fix="Keep it until it is read."
            )
        return [(place.name, _view(self.data, place)) for place in self.layout]


def flatten(
    named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    device: torch.device | str | None = None,
) -> FlattenedBucket:
    """Copy named tensors into one bucket: one copy of each, whatever its strides.

    Args:
        named_tensors: float tensors of any mixture of dtypes, shapes and strides.
        device: where the bucket goes; None: where its tensors are, which must be one place then.

    Raises:
        WeightUpdateError: a pair that is none, a tensor that can be no weight, a name given twice.
        RequestError: tensors on several devices, and no `device`.
    """
    pairs = list(_pairs(named_tensors))
    places = {tensor.device for _, tensor in pairs}
    if device is None and len(places) > 1:
        raise RequestError(
            "the tensors of a bucket are on several devices",
            got=sorted(map(str, places)),
            fix="Pass flatten(..., device=...).",
        )
    home = torch.device(device) if device is not None else next(iter(places), torch.device("cpu"))
    packer = _Packer(sum(_rounded(tensor.nbytes) for _, tensor in pairs), home)
    for name, tensor in pairs:
        packer.add(name, tensor)
    return packer.take()


def buckets(
    named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    bucket_bytes: int,
    device: torch.device | str | None = None,
) -> Iterator[FlattenedBucket]:
    """Named tensors, in order, as buckets of at most `bucket_bytes`; a larger tensor has one of its own.

    Lazy: an iterator is read as buckets are asked for. Each tensor is copied as it comes and let go, so that
    a bucket and one tensor are held at a time, provided the caller drops a bucket before asking for the next.

    Args:
        named_tensors: as for `flatten`.
        bucket_bytes: at least 1.
        device: where buckets go; None: where the first tensor of each is.

    Raises:
        RequestError, at the call: `bucket_bytes` is no positive integer.
        WeightUpdateError, as it comes: as `flatten`, names within a bucket.
    """
    limit = check_integer("bucket_bytes", bucket_bytes, low=1)
    return _buckets(_pairs(named_tensors), limit, device)


def _buckets(
    pairs: Iterator[tuple[str, Tensor]], limit: int, device: torch.device | str | None
) -> Iterator[FlattenedBucket]:
    packer: _Packer | None = None
    for name, tensor in pairs:
        if packer is not None and not packer.fits(tensor):
            yield packer.take()
            packer = None
        if packer is None:
            packer = _Packer(max(limit, tensor.nbytes), torch.device(device) if device else tensor.device)
        packer.add(name, tensor)
        del tensor
    if packer is not None:
        yield packer.take()


class _Packer:
    """A bucket being filled, of ordinary tensors also where the caller infers."""

    @torch.inference_mode(False)
    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._data = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._layout: list[Placement] = []
        self._end = 0

    def fits(self, tensor: Tensor) -> bool:
        return _rounded(self._end) + tensor.nbytes <= self._data.numel()

    @torch.inference_mode(False)
    @torch.no_grad()
    def add(self, name: str, tensor: Tensor) -> None:
        place = Placement(name, tensor.dtype, tuple(tensor.shape), _rounded(self._end))
        _view(self._data, place).copy_(tensor)
        self._layout.append(place)
        self._end = place.offset + place.nbytes

    def take(self) -> FlattenedBucket:
        """The bucket, which is the caller's alone from then on."""
        data = self._data[: self._end]
        self._data = data[:0].clone()
        return FlattenedBucket(data, self._layout)


def encode_layout(layout: Sequence[Placement]) -> bytes:
    """A layout as JSON, [[name, dtype, shape, offset], ...], for `decode_layout` at the other end.

    Raises:
        RequestError: it would take more than `LAYOUT_LIMIT` bytes.
    """
    rows = [[name, _NAMES[dtype], list(shape), offset] for name, dtype, shape, offset in layout]
    raw = json.dumps(rows, separators=(",", ":")).encode()
    if len(raw) > LAYOUT_LIMIT:
        raise RequestError(
            f"the layout of a bucket takes at most {LAYOUT_LIMIT:,} bytes of JSON",
            got=f"{len(raw):,} bytes for {len(rows):,} tensors",
            fix="Use smaller buckets.",
        )
    return raw


def decode_layout(raw: bytes, nbytes: int | None = None) -> tuple[Placement, ...]:
    """The layout that `encode_layout` wrote, believed in nothing: it may come from another process.

    Args:
        nbytes: size of the bucket's data; None: the layout says it, `layout_bytes`.

    Raises:
        WeightUpdateError: too long, no JSON of this form, a dtype that isn't known, names given twice,
            tensors that overlap or lie outside.
    """
    if len(raw) > LAYOUT_LIMIT:
        raise _broken(f"{len(raw):,} bytes of JSON, where {LAYOUT_LIMIT:,} are allowed")
    try:
        rows = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _broken("it is not JSON") from error
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 4 for row in rows):
        raise _broken("it is no list of [name, dtype, shape, offset]")
    for name, dtype, _, _ in rows:
        if not isinstance(dtype, str) or dtype not in FLOATS:
            raise _broken(f"dtype {dtype!r:.100} of {name!r:.100}, which is none of {', '.join(FLOATS)}")
    named = [(name, FLOATS[dtype], shape, offset) for name, dtype, shape, offset in rows]
    return _checked(named, _MAX_SIZE if nbytes is None else nbytes, 0)


def layout_bytes(layout: Sequence[Placement]) -> int:
    """Bytes of data that a layout describes."""
    return max((place.offset + place.nbytes for place in layout), default=0)


def _checked(layout: Sequence[Any], nbytes: int, skip: int) -> tuple[Placement, ...]:
    """The layout's rows, each checked alone and against the others.

    Args:
        nbytes: size of the data.
        skip: bytes by which the data starts after an aligned address.
    """
    rows = layout if isinstance(layout, list | tuple) else [None]
    if not all(isinstance(row, tuple | list) and len(row) == 4 for row in rows):
        raise _broken("it is no list of (name, dtype, shape, offset)")
    places = tuple(_placement(*row) for row in layout)
    if len({place.name for place in places}) < len(places):
        raise _broken("a name is given twice")
    end = 0
    for place in sorted(places, key=lambda place: (place.offset, place.nbytes)):
        if place.nbytes and place.offset < end:
            raise _broken(f"{place.name!r} starts at {place.offset:,}, before {end:,} where another ends")
        if place.offset + place.nbytes > nbytes:
            raise _broken(f"{place.name!r} ends at byte {place.offset + place.nbytes:,} of {nbytes:,}")
        if (place.offset + skip) % place.dtype.itemsize:
            raise _broken(f"{place.name!r}, {place.dtype}, starts at byte {place.offset:,}: unaligned")
        end = max(end, place.offset + place.nbytes)
    return places


def _placement(name: Any, dtype: Any, shape: Any, offset: Any) -> Placement:
    if not isinstance(name, str):
        raise _broken(f"{name!r:.100} is no name")
    if not isinstance(dtype, torch.dtype) or dtype not in _NAMES:
        raise _broken(f"{name!r:.200} is {dtype!r:.100}, which is none of {', '.join(FLOATS)}")
    sizes: list[Any] = list(shape) if isinstance(shape, Sequence) else [None]
    whole = all(type(number) is int and number >= 0 for number in (*sizes, offset))
    if not whole or len(sizes) > _MAX_RANK or prod(max(size, 1) for size in sizes) > _MAX_SIZE:
        raise _broken(f"{name!r:.200} has shape {shape!r:.100} and offset {offset!r:.100}")
    return Placement(name, dtype, tuple(shape), offset)


@torch.inference_mode(False)
def _view(data: Tensor, place: Placement) -> Tensor:
    return data[place.offset : place.offset + place.nbytes].view(place.dtype).view(place.shape)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _pairs(
    named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
) -> Iterator[tuple[str, Tensor]]:
    source = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    return map(_float_pair, source, count())  # unlike a generator, holds no item


def _float_pair(item: Any, at: int) -> tuple[str, Tensor]:
    name, tensor = check_pair(item, at)
    fault = fault_of(tensor)
    if fault is None:
        return name, tensor
    del item, tensor
    raise WeightUpdateError(f"{name} is {fault}", fix="Pass full, plain float tensors.")


def _broken(what: str) -> WeightUpdateError:
    return WeightUpdateError(
        f"the layout of a bucket is damaged: {what}", fix="Make buckets with tokenspeed_rl.weights.flatten."
    )
