"""What an update over a group says it will bring: names, dtypes and shapes, before a byte has come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.requests import UpdateWeightsFromDistributedReqInput
from tokenspeed_rl.weights.incoming import BUCKET_FORMAT, check_update
from tokenspeed_rl.weights.plain import FLOATS

Promise = tuple[str, torch.dtype, tuple[int, ...]]


def read_promise(obj: UpdateWeightsFromDistributedReqInput) -> list[Promise]:
    """(name, dtype, shape) of every tensor that the request announces.

    Raises:
        RequestError: a field that isn't as documented.
    """
    check_update(obj)
    if obj.load_format not in (None, BUCKET_FORMAT):
        raise RequestError(
            f"load_format must be None or {BUCKET_FORMAT!r}", got=obj.load_format, fix="Leave it out."
        )
    names, dtypes, shapes = (
        _listed(field, getattr(obj, field)) for field in ("names", "dtype_names", "shapes")
    )
    if not len(names) == len(dtypes) == len(shapes):
        raise RequestError(
            "names, dtype_names and shapes must be equally long",
            got=(len(names), len(dtypes), len(shapes)),
            fix="Give one dtype and one shape for each name.",
        )
    return [
        (_name(name), _dtype(name, dtype), _shape(name, shape))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]


def _listed(field: str, value: Any) -> list[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise RequestError(f"{field} must be a list", got=value, fix="Give one entry for each tensor.")
    return list(value)


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise RequestError("names must be strings", got=name, fix="Give Hugging Face names.")
    return name


def _dtype(name: str, dtype: Any) -> torch.dtype:
    found = FLOATS.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise RequestError(
            f"the dtype of {name} must be of {', '.join(FLOATS)}", got=dtype, fix="Cast it first."
        )
    return found


def _shape(name: str, shape: Any) -> tuple[int, ...]:
    sizes = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else (None,)
    if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in sizes):
        raise RequestError(
            f"the shape of {name} must be a list of sizes", got=shape, fix="Give list(tensor.shape)."
        )
    return sizes
