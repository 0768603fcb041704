"""Functions as torch ops, and which of them run in Triton."""

import os
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Whether Triton interprets its kernels, on CPU tensors: told by the environment when this is imported."""

_LIBRARY = torch.library.Library("tokenspeed_rl", "DEF")


def runs_triton(tensor: Tensor) -> bool:
    """Whether an op that is given this tensor runs its Triton kernel."""
    return tensor.is_cuda or INTERPRETED


def op(fake: Callable[P, R], *, mutates: tuple[str, ...] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a function as ``torch.ops.tokenspeed_rl.<name without leading underscore>``, for every device.

    `torch.library.custom_op` does the same and costs 12 us a call, this 2. There is no derivative, and no
    autocast: results have the dtypes that the op promises.

    Args:
        fake: the same signature: results of the right shape and dtype, nothing computed.
        mutates: names of the arguments that are written to.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__.lstrip("_")
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=mutates))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"tokenspeed_rl::{name}", fake, lib=_LIBRARY)
        registered = getattr(torch.ops.tokenspeed_rl, name).default

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
                with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                    return call(*args, **kwargs)
            result: R = registered(*args, **kwargs)
            return result

        return call

    return register
