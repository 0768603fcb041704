"""Tests of Triton kernels by its interpreter: collected where ``TRITON_INTERPRET=1`` was set at the start."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tokenspeed_rl_kernels.registry import INTERPRETED

if not INTERPRETED:
    collect_ignore_glob = ["test_*.py"]

DTYPES = [torch.float32, torch.float16]
"""What the interpreter computes rightly; bfloat16 it does not."""


@pytest.fixture(params=DTYPES, ids=["fp32", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """A dtype of inputs."""
    found: torch.dtype = request.param
    return found


@pytest.fixture(autouse=True)
def quick_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a module's device functions prepare Triton's language once a test, not at every call.

    It takes a millisecond: most of the time of a kernel that has helpers.
    """
    from triton.runtime.interpreter import InterpretedFunction

    prepare_and_call, ready = InterpretedFunction.__call__, set[str]()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.fn.__module__
        if module in ready:
            return self.rewrite()(*args, **kwargs)
        ready.add(module)
        return prepare_and_call(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "__call__", call)


@pytest.fixture
def programs_from(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """What makes a grid's programs take themselves, on the first axis, for `first`, `first + 1`, and so on.

    So the last of a million runs without the others.
    """
    from triton.runtime.interpreter import interpreter_builder as builder

    told = builder.set_grid_idx

    def programs_from(first: int) -> None:
        def tell(x: int, y: int, z: int) -> None:
            told(x, y, z)
            builder.grid_idx = first + x, y, z

        monkeypatch.setattr(builder, "set_grid_idx", tell)

    return programs_from


@pytest.fixture
def poisoned_scratch() -> Iterator[None]:
    """Tensors made without values are NaN, or the largest integer, for the time of a test."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
