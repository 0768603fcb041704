"""Both ends of a weight group in threads of one process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_rl.errors import EngineShutdownError
from tokenspeed_rl.weights.transport.group import WeightsGroup
from tokenspeed_rl.weights.transport.sender import WeightsSender

# torch looks the address it connects to up backwards; an answer that gets lost then costs 1 s, not 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
PATIENCE = 30.0
"""Seconds after which a test gives up on a thread."""


class Stop:
    """A `check` that raises from the moment it is told to."""

    def __init__(self) -> None:
        self.polled = threading.Event()
        self.now = False

    def __call__(self) -> None:
        if self.now:
            raise EngineShutdownError("the engine was shut down")
        self.polled.set()


class Ends:
    """Makes senders and receivers, runs calls in threads, closes everything in the end."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self.made: list[Any] = []

    def sender(self, world_size: int = 2, **fields: Any) -> WeightsSender:
        fields = {
            "master_address": "127.0.0.1",
            "master_port": 0,
            "backend": "gloo",
            "timeout": 20.0,
        } | fields
        self.made.append(WeightsSender(world_size=world_size, **fields))
        return self.made[-1]

    def receiver(
        self, sender: WeightsSender | int, rank: int = 1, world_size: int = 2, **fields: Any
    ) -> WeightsGroup:
        port = sender if isinstance(sender, int) else sender.master_port
        fields = {"backend": "gloo", "timeout": 20.0} | fields
        self.made.append(WeightsGroup("127.0.0.1", port, rank, world_size, **fields))
        return self.made[-1]

    def pair(self, **fields: Any) -> tuple[WeightsSender, WeightsGroup]:
        sender = self.sender(**fields)
        return sender, self.receiver(sender)

    def start(self, act: Callable[..., Any], *args: Any, **fields: Any) -> Future[Any]:
        return self._pool.submit(act, *args, **fields)

    @staticmethod
    def stop() -> Stop:
        return Stop()

    @staticmethod
    def seconds(act: Callable[[], object]) -> float:
        began = time.monotonic()
        act()
        return time.monotonic() - began

    @staticmethod
    def expected(
        named: Mapping[str, Tensor] | Sequence[tuple[str, Tensor]],
    ) -> list[tuple[str, torch.dtype, Any]]:
        pairs = named.items() if isinstance(named, Mapping) else named
        return [(name, tensor.dtype, list(tensor.shape)) for name, tensor in pairs]

    @staticmethod
    def take(
        group: WeightsGroup,
        expected: Sequence[tuple[str, torch.dtype, Any]],
        flattened: bool = True,
        timeout: float = 20.0,
        check: Callable[[], None] = lambda: None,
    ) -> dict[str, Tensor]:
        """What an engine does: copy everything out, then acknowledge; or acknowledge the error."""
        try:
            steps = group.receive(expected, flattened=flattened, timeout=timeout, check=check)
            got = {name: tensor.clone() for name, tensor in steps}
        except BaseException as error:
            group.acknowledge(error)
            raise
        group.acknowledge(None)
        return got

    def update(
        self,
        sender: WeightsSender,
        group: WeightsGroup,
        named: Mapping[str, Tensor],
        source: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None = None,
        flattened: bool = True,
        bucket_bytes: int = 1 << 20,
    ) -> dict[str, Tensor]:
        sending = self.start(sender.send, named if source is None else source, bucket_bytes)
        got = self.take(group, self.expected(named), flattened)
        sending.result(PATIENCE)
        return got

    def works(self, sender: WeightsSender, group: WeightsGroup) -> bool:
        """Whether an update still goes through, bit for bit, in both formats."""
        named = {"w": torch.arange(6.0).view(2, 3), "v": torch.ones(4, dtype=torch.bfloat16)}
        return all(
            same_bits(self.update(sender, group, named, flattened=way), named) for way in (False, True)
        )


def same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    assert left.keys() == right.keys()
    return all(
        left[name].dtype == tensor.dtype
        and left[name].shape == tensor.shape
        and torch.equal(_raw(left[name]), _raw(tensor))
        for name, tensor in right.items()
    )


def _raw(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@pytest.fixture
def ends() -> Iterator[Ends]:
    with ThreadPoolExecutor(12) as pool:
        ends = Ends(pool)
        try:
            yield ends
        finally:
            for made in ends.made:
                made.close()


@pytest.fixture(scope="session")
def same() -> Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], bool]:
    return same_bits
