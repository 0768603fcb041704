"""CUDA graphs as they are captured, run and given back, on an imagined device that notes what it is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tokenspeed_rl.core.capture import CudaCapture


class ImaginedCuda:
    """What `CudaCapture` uses of `torch.cuda`: every call is a line of `told`, memory grows by a capture."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.reserved = 1000
        self.fails = False

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.told.append("side stream")
        try:
            yield
        finally:
            self.told.append("own stream")

    @contextmanager
    def graph(self, graph: Any, *, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        self.told.append(f"capture into {pool or 'a new pool'}, {capture_error_mode}")
        yield
        if self.fails:
            raise RuntimeError("the work can't be captured")
        self.reserved += 24
        self.told.append("captured")

    def memory_reserved(self) -> int:
        return self.reserved

    def synchronize(self) -> None:
        self.told.append("synchronise")

    def empty_cache(self) -> None:
        self.reserved = 1000
        self.told.append("empty cache")

    def Stream(self) -> Any:
        return self

    def current_stream(self) -> Any:
        return self

    def wait_stream(self, other: Any) -> None:
        self.told.append("wait")

    def CUDAGraph(self) -> Any:
        return ImaginedGraph(self.told)


class ImaginedGraph:
    """A graph."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def pool(self) -> str:
        return "the same pool"

    def replay(self) -> None:
        self.told.append("replay")

    def reset(self) -> None:
        self.told.append("reset")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> ImaginedCuda:
    imagined = ImaginedCuda()
    monkeypatch.setattr(torch, "cuda", imagined)
    return imagined


def test_captured_once_and_replayed(cuda: ImaginedCuda) -> None:
    """The work runs beside everything else, then is recorded; all graphs share a pool; other threads may use
    the device meanwhile."""
    capture = CudaCapture(torch.device("cpu"))
    replay = capture(lambda: cuda.told.append("work"))
    warm_up = ["wait", "side stream", "work", "synchronise", "empty cache"]
    captured = ["capture into a new pool, thread_local", "work", "captured"]
    assert cuda.told == [*warm_up, *captured, "own stream", "wait"]
    cuda.told.clear()
    replay()
    assert cuda.told == ["replay"]
    capture(lambda: None)
    assert "capture into the same pool, thread_local" in cuda.told and capture.nbytes == 48


def test_everything_is_given_back(cuda: ImaginedCuda) -> None:
    """A11: with the tag released, graphs are gone and their memory is the device's again."""
    capture = CudaCapture(torch.device("cpu"))
    for _ in range(2):
        capture(lambda: None)
    cuda.told.clear()
    capture.close()
    assert cuda.told == ["reset", "reset", "empty cache"] and capture.nbytes == 0
    capture(lambda: None)
    assert "capture into a new pool, thread_local" in cuda.told


def test_a_failed_capture_is_not_kept(cuda: ImaginedCuda) -> None:
    """What couldn't be captured raises, on the stream of before; it is neither counted nor reset."""
    capture = CudaCapture(torch.device("cpu"))
    cuda.fails = True
    with pytest.raises(RuntimeError, match="can't be captured"):
        capture(lambda: None)
    assert cuda.told[-1] == "own stream"
    cuda.told.clear()
    capture.close()
    assert "reset" not in cuda.told and capture.nbytes == 0
