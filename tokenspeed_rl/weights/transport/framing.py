"""How the tensors of one transfer lie on the wire, in both formats, and what they are checked against.

Plain: one broadcast per expected tensor, in order. Buckets: per bucket a header of two int64 (bytes of
layout, bytes of data), the layout as JSON, the data; until every expected tensor has come. Nothing is
pickled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from tokenspeed_rl.errors import WeightUpdateError
from tokenspeed_rl.weights.bucket import (
    LAYOUT_LIMIT,
    FlattenedBucket,
    Placement,
    buckets,
    decode_layout,
    encode_layout,
    layout_bytes,
)
from tokenspeed_rl.weights.plain import fault_of
from tokenspeed_rl.weights.transport.handshake import Expected

Broadcast = Callable[[Tensor], None]
"""Sends rank 0's contiguous tensor, or receives into it, and waits for that."""
_SHOWN = 3


def send_plain(pairs: Iterable[tuple[str, Tensor]], device: torch.device, broadcast: Broadcast) -> None:
    """Broadcast every tensor by itself; only one that isn't contiguous or lies elsewhere is copied."""
    for _, tensor in pairs:
        broadcast(tensor.detach().to(device).contiguous())
        del tensor


def send_buckets(
    pairs: Iterable[tuple[str, Tensor]], bucket_bytes: int, device: torch.device, broadcast: Broadcast
) -> None:
    """Broadcast the tensors in buckets of at most `bucket_bytes` (a larger tensor has its own)."""
    for bucket in buckets(pairs, bucket_bytes, device):
        layout = torch.frombuffer(bytearray(encode_layout(bucket.layout)), dtype=torch.uint8).to(device)
        broadcast(torch.tensor([layout.numel(), bucket.data.numel()], dtype=torch.int64, device=device))
        broadcast(layout)
        broadcast(bucket.data)
        del bucket


def receive_plain(
    expected: Sequence[Expected], device: torch.device, broadcast: Broadcast
) -> Iterator[tuple[str, Tensor]]:
    """The expected tensors, one after the other; nothing is kept."""
    for name, dtype, shape in expected:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        broadcast(tensor)
        yield name, tensor
        del tensor


def receive_buckets(
    expected: Sequence[Expected], device: torch.device, broadcast: Broadcast
) -> Iterator[tuple[str, Tensor]]:
    """The expected tensors, as views of buckets: one bucket is held at a time.

    Raises:
        WeightUpdateError: a bucket that isn't framed as it must be, or holds something else.
    """
    remaining = {item.name: item for item in expected}
    while remaining:
        layout = _receive_layout(remaining, device, broadcast)
        data = torch.empty(layout_bytes(layout), dtype=torch.uint8, device=device)
        broadcast(data)
        yield from FlattenedBucket(data, layout).tensors()
        del data


def _receive_layout(
    remaining: dict[str, Expected], device: torch.device, broadcast: Broadcast
) -> tuple[Placement, ...]:
    """The next bucket's layout, believed where it fits what is still expected, which it is taken from."""
    header = torch.zeros(2, dtype=torch.int64, device=device)
    broadcast(header)
    length, nbytes = (int(number) for number in header.tolist())
    if not 0 < length <= LAYOUT_LIMIT:
        raise WeightUpdateError("the sender's framing is damaged", got=f"a layout of {length:,} bytes")
    raw = torch.empty(length, dtype=torch.uint8, device=device)
    broadcast(raw)
    layout = decode_layout(bytes(raw.cpu().numpy()), nbytes)
    if not layout or layout_bytes(layout) != nbytes:
        got = f"{nbytes:,} bytes for {len(layout)} tensors"
        raise WeightUpdateError("the sender's framing is damaged", got=got)
    for name, dtype, shape, _ in layout:
        item = remaining.pop(name, None)
        if item is None or item[1:] != (dtype, shape):
            told = "nothing (more) of that name" if item is None else _describe(item.dtype, item.shape)
            sent = _describe(dtype, shape)
            raise WeightUpdateError(f"the sender sent {name} as {sent}, expected was {told}")
    return layout


def mismatch(named: Sequence[tuple[str, Tensor]], expected: Sequence[Expected]) -> str | None:
    """How the sender's tensors differ from what receivers were told, whatever the order; None: not at all."""
    told = {item.name: item for item in expected}
    names = [name for name, _ in named]
    differing = [
        f"{name} is {_describe(tensor.dtype, tensor.shape)}, not {_describe(*told[name][1:])}"
        for name, tensor in named
        if name in told and told[name][1:] != (tensor.dtype, tuple(tensor.shape))
    ]
    given = set(names)
    faults = {
        "given twice": [name for name, times in Counter(names).items() if times > 1],
        "missing at the sender": [name for name in told if name not in given],
        "unknown to the receivers": [name for name in names if name not in told],
        "of another dtype or shape": differing,
        "unfit": [f"{name}: {fault}" for name, tensor in named if (fault := fault_of(tensor)) is not None],
    }
    return _listed(faults)


def checked(
    pairs: Iterable[tuple[str, Tensor]], expected: Sequence[Expected], *, ordered: bool
) -> Iterator[tuple[str, Tensor]]:
    """`pairs` of a one-shot iterator, each checked as it comes, nothing kept.

    Args:
        ordered: they must come in the order of `expected`.

    Raises:
        WeightUpdateError: a tensor that isn't the next (or any) of those still expected, or too few.
    """
    remaining, source = {item.name: item for item in expected}, iter(pairs)
    for name, tensor in source:
        if ordered and remaining and name in remaining and name != next(iter(remaining)):
            raise WeightUpdateError(
                f"{name} came where {next(iter(remaining))} was expected",
                fix="Send in the order of the receivers' names, or pass a mapping.",
            )
        item = remaining.pop(name, None)
        fault = mismatch([(name, tensor)], [item] if item else [])
        if fault is not None:
            del tensor
            raise WeightUpdateError(f"the sender's iterator gave something else than was asked for: {fault}")
        if not remaining:
            _refuse_more(source)  # before the receivers have all they wait for
        yield name, tensor
        del tensor
    if remaining:
        raise WeightUpdateError(f"the sender's iterator ended early: {_listed({'missing': list(remaining)})}")


def _refuse_more(source: Iterator[tuple[str, Tensor]]) -> None:
    for name, _ in source:
        raise WeightUpdateError(f"the sender's iterator goes on after the last tensor, with {name}")


def in_order(named: Sequence[tuple[str, Tensor]], expected: Sequence[Expected]) -> list[tuple[str, Tensor]]:
    """`named`, which matches, in the order of `expected`."""
    tensors = dict(named)
    return [(item.name, tensors[item.name]) for item in expected]


def _listed(faults: dict[str, list[str]]) -> str | None:
    found = []
    for what, names in faults.items():
        if names:
            dots = ", ..." if len(names) > _SHOWN else ""
            found.append(f"{len(names)} {what} ({', '.join(names[:_SHOWN])}{dots})")
    return "; ".join(found) or None


def _describe(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
