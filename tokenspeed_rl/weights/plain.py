"""Which tensors can be weights: plain ones, with values, of a float dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tokenspeed_rl.errors import WeightUpdateError, shorten

FLOATS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""Names of the dtypes a weight may come in."""
_DTYPES = frozenset(FLOATS.values())


def fault_of(tensor: Tensor) -> str | None:
    """What makes a tensor unfit to be a weight, whatever its name and shape; None: nothing does."""
    kind = type(tensor)
    if kind is not Tensor and kind is not nn.Parameter:
        return f"a {kind.__name__}, not a plain tensor{_fix(tensor)}"
    if tensor.dtype not in _DTYPES:
        return f"{tensor.dtype}, not one of {', '.join(FLOATS)}: dequantise or cast it"
    if tensor.layout is not torch.strided:
        return f"{tensor.layout}, not strided: pass its to_dense()"
    if tensor.device.type == "meta":
        return "on the meta device, without values"
    if lacks_memory(tensor):
        return "without its memory, which was freed (as FSDP does) or cut short: gather it first"
    return None


def lacks_memory(tensor: Tensor) -> bool:
    """Whether a strided tensor reaches past the end of its storage: torch would read there, and crash."""
    if tensor.numel() == 0:
        return False
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    last = tensor.storage_offset() + sum(stride * (size - 1) for stride, size in pairs)
    return (last + 1) * tensor.itemsize > tensor.untyped_storage().nbytes()


def _fix(tensor: Tensor) -> str:
    return ": pass its full_tensor()" if hasattr(tensor, "full_tensor") else ""


def check_pair(item: Any, at: int) -> tuple[str, Tensor]:
    """Item number `at` of the caller's as (name, tensor).

    Raises:
        WeightUpdateError: it is something else.
    """
    if not (isinstance(item, tuple | list) and len(item) == 2):
        got, item = _brief(item), None
        raise WeightUpdateError(f"item {at} is no (name, tensor) pair: {got}", fix="Pass such pairs.")
    name, tensor = item
    if isinstance(name, str) and isinstance(tensor, Tensor):
        return name, tensor
    got, item, tensor = f"({_brief(name)}, {_brief(tensor)})", None, None
    raise WeightUpdateError(
        f"item {at} is no pair of a string and a torch tensor: {got}",
        fix="Pass (name, tensor) pairs, as named_parameters() gives them.",
    )


def _brief(value: Any) -> str:
    """Short text for any value; a tensor's values, and the tensor itself, stay out of it."""
    return f"a {type(value).__name__}" if isinstance(value, Tensor | tuple | list) else shorten(value)
