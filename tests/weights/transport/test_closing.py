"""Closing either end of a weight group, at any moment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_rl.errors import EngineStateError, WeightUpdateError
from tokenspeed_rl.weights.transport.rendezvous import Deadline, patiently

SLACK = 5.0
"""Seconds that a busy machine may add."""
NAMED = {"a": torch.ones(3, 2), "b": torch.zeros(5, dtype=torch.bfloat16), "c": torch.full((4,), 7.0)}


def test_closing(ends: Any) -> None:
    """Either end may close at any moment, and again: whoever waits fails soon, later calls say why."""
    sender, group = ends.pair()
    stop = ends.stop()
    taking = ends.start(ends.take, group, ends.expected(NAMED), True, 60.0, stop)
    assert stop.polled.wait(20)
    group.close()
    with pytest.raises(WeightUpdateError, match=r"closed.*init_weights_update_group"):
        taking.result(SLACK)
    with pytest.raises(EngineStateError, match=r"closed.*init_weights_update_group"):
        group.receive(ends.expected(NAMED), flattened=True, timeout=20)  # without taking a step
    group.close()

    other, stop = ends.receiver(sender), ends.stop()
    taking = ends.start(ends.take, other, ends.expected(NAMED), True, 60.0, stop)
    assert stop.polled.wait(20)
    with sender:
        pass
    sender.close()
    with pytest.raises(
        WeightUpdateError, match=r"the sender at 127.0.0.1:\d+ is gone.*init_weights_update_group"
    ):
        taking.result(SLACK)
    assert other.broken is not None and not other.alive()
    with pytest.raises(EngineStateError, match="closed"):
        sender.send(NAMED)


def test_closing_while_connections_form(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """E8: `close` ends the wait for a peer that doesn't connect, and both ends hear why."""
    sender, group = ends.pair(timeout=30)
    forming, stuck = threading.Event(), threading.Event()

    def form(prefix: str, deadline: Deadline, check: Callable[[], None]) -> Any:
        forming.set()
        return patiently(stuck.wait, deadline, check, "nobody connected")

    monkeypatch.setattr(group._maker, "form", form)
    sending = ends.start(sender.send, NAMED)
    taking = ends.start(ends.take, group, ends.expected(NAMED), True, 30.0)
    assert forming.wait(20)
    assert ends.seconds(group.close) < 1
    for job in (taking, sending):
        with pytest.raises(WeightUpdateError, match="it was closed"):
            job.result(SLACK)
    stuck.set()


def test_closing_a_sender_ends_its_send(ends: Any) -> None:
    """A trainer's other thread can end a send that waits for receivers."""
    sender, began = ends.sender(timeout=60), threading.Event()

    def source() -> Iterator[tuple[str, Tensor]]:
        began.set()
        yield from NAMED.items()

    group = ends.receiver(sender)
    sending = ends.start(sender.send, source(), 1)
    next(group.receive(ends.expected(NAMED), flattened=False, timeout=20))
    assert began.wait(20)
    sender.close()
    with pytest.raises(EngineStateError, match="closed"):
        sending.result(SLACK)
