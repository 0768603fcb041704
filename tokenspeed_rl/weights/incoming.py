"""What a caller may hand in as new weights: a whole set that can be judged first, or a stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from tokenspeed_rl.errors import RequestError, WeightUpdateError
from tokenspeed_rl.requests import (
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
)
from tokenspeed_rl.sampling_params import check_bool, check_timeout
from tokenspeed_rl.weights.bucket import FlattenedBucket
from tokenspeed_rl.weights.plain import check_pair

BUCKET_FORMAT = "flattened_bucket"


@dataclasses.dataclass(slots=True)
class Incoming:
    """New weights: exactly one of the two fields is given."""

    whole: list[tuple[str, Tensor]] | None = None
    """The whole set, to be checked before anything is written."""
    stream: Iterator[tuple[str, Tensor]] | None = None
    """Pairs as the caller's iterator gives them, on whose thread it must run. Nothing is kept between two."""


def read_tensors(obj: UpdateWeightsFromTensorReqInput, *, rank: int = 0, ranks: int = 1) -> Incoming:
    """What the request brings, checked as far as it goes without judging names and tensors.

    A mapping, list, tuple, bucket or safetensors bytes is a whole set; every other iterable is a stream, of
    which nothing is read yet.

    Args:
        rank, ranks: the engine's tensor-parallel rank and number of ranks: which of the bytes are its own.

    Raises:
        RequestError: a field that isn't as documented; none or two sources.
        WeightUpdateError: damaged bytes, or items that are no (name, tensor) pairs.
    """
    check_update(obj)
    source, serialized = obj.named_tensors, obj.serialized_named_tensors
    if (source is None) == (serialized is None):
        raise RequestError(
            "exactly one of named_tensors and serialized_named_tensors must be given",
            got="neither" if source is None else "both",
            fix="Pass (name, tensor) pairs, or safetensors bytes.",
        )
    _check_format(obj)
    if serialized is not None:
        return Incoming(whole=_deserialized(serialized, rank, ranks))
    if isinstance(source, FlattenedBucket):
        return Incoming(whole=source.tensors())
    if isinstance(source, str | bytes | Tensor | nn.Module) or not isinstance(source, Iterable):
        raise RequestError(
            "named_tensors must be a mapping, a list or an iterator of (name, tensor), or a FlattenedBucket",
            got=type(source),
            fix="Pass model.named_parameters(), for example.",
        )
    if isinstance(source, Mapping | Sequence):
        return Incoming(whole=_listed(source))
    return Incoming(stream=map(check_pair, source, count()))  # unlike a generator, holds no item


def _listed(source: Mapping[str, Tensor] | Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    try:
        items = list(source.items() if isinstance(source, Mapping) else source)
    except Exception as error:  # a mapping or sequence of the caller's own making
        text = f"{type(error).__name__}: {error}"
        raise WeightUpdateError(f"the source of the named tensors raised {text}") from error
    return list(map(check_pair, items, count()))


def check_update(
    obj: UpdateWeightsFromTensorReqInput
    | UpdateWeightsFromDistributedReqInput
    | UpdateWeightFromDiskReqInput,
) -> None:
    """Check what every update request has: flags, label, timeout.

    Raises:
        RequestError: the first field that isn't as documented.
    """
    for field in dataclasses.fields(obj):
        if field.type == "bool":
            check_bool(field.name, getattr(obj, field.name))
    check_label("weight_version", obj.weight_version)
    timeout = getattr(obj, "timeout", None)
    check_timeout(timeout)
    if timeout is not None and timeout <= 0:
        raise RequestError("timeout must be above 0 seconds", got=timeout, fix="Pass a number of seconds.")


def is_label(label: Any) -> bool:
    """Whether `label` is a non-empty string, without half a character in it that no file would take."""
    return isinstance(label, str) and label != "" and label.encode(errors="ignore").decode() == label


def check_label(name: str, label: Any) -> None:
    """Refuse what can't label weights. Raises RequestError."""
    if label is not None and not is_label(label):
        raise RequestError(
            f"{name} must be a non-empty string that can be written as UTF-8",
            got=label,
            fix="None labels the weights with the number of updates so far.",
        )


def _check_format(obj: UpdateWeightsFromTensorReqInput) -> None:
    if obj.load_format not in (None, BUCKET_FORMAT):
        raise RequestError(
            f"load_format must be None or {BUCKET_FORMAT!r}", got=obj.load_format, fix="Leave it out."
        )
    if obj.load_format == BUCKET_FORMAT and not isinstance(obj.named_tensors, FlattenedBucket):
        raise RequestError(
            f"load_format={BUCKET_FORMAT!r} needs a FlattenedBucket as named_tensors",
            got=type(obj.named_tensors),
            fix="Pass tokenspeed_rl.weights.flatten(named_tensors), or leave load_format out.",
        )


def _deserialized(serialized: Any, rank: int, ranks: int) -> list[tuple[str, Tensor]]:
    if isinstance(serialized, str | bytes | bytearray) or not isinstance(serialized, Sequence):
        raise RequestError(
            "serialized_named_tensors must be a list of safetensors bytes, one per tensor-parallel rank",
            got=type(serialized),
            fix="Pass [safetensors.torch.save(tensors)].",
        )
    if len(serialized) != ranks or not all(isinstance(raw, bytes | bytearray) for raw in serialized):
        raise RequestError(
            f"serialized_named_tensors must hold {ranks} safetensors bytes, one per tensor-parallel rank",
            got=[type(raw) for raw in serialized],
            fix="Pass [safetensors.torch.save(tensors)].",
        )
    try:
        return list(load(bytes(serialized[rank])).items())
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise WeightUpdateError(
            f"serialized_named_tensors[{rank}] is no intact safetensors file: {error}",
            fix="Pass the bytes that safetensors.torch.save returned. Pickle is never read.",
        ) from error
