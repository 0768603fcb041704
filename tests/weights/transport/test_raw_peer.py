"""Receiving from a rank 0 that is no `WeightsSender`, but a torch group that somebody made by hand."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tokenspeed_rl.errors import EngineStateError, EngineTimeoutError, WeightUpdateError

NAMED = {
    "a": torch.randn(5, 3),
    "b": torch.randn(7).bfloat16(),
    "c": torch.tensor(2.5),
    "d": torch.zeros(0, 2),
}


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def make(store: dist.Store, prefix: str) -> Any:
    return dist.ProcessGroupGloo(dist.PrefixStore(prefix, store), 0, 2, timedelta(seconds=20))


LARGE = torch.zeros(1 << 24)
"""More than fits into what the system buffers on a connection."""


def broadcast(group: Any, tensor: Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([tensor], options).wait()


@pytest.mark.parametrize(
    "prefix",
    ["weight_update_group", "weight_update_group/weight_update_group//cpu/"],
    ids=["by hand", "as init_process_group nests it"],
)
def test_plain_broadcasts_in_order(
    ends: Any, same: Callable[..., bool], store: dist.TCPStore, prefix: str
) -> None:
    """`load_format=None` is one broadcast per name from rank 0, whoever that is, update after update."""
    forming = ends.start(make, store, prefix)
    receiver = ends.receiver(store.port)
    raw = forming.result(20)
    for _ in range(2):
        taking = ends.start(ends.take, receiver, ends.expected(NAMED), False)
        for tensor in NAMED.values():
            broadcast(raw, tensor)
        assert same(taking.result(30), NAMED)
    with pytest.raises(WeightUpdateError, match=r"no WeightsSender.*load_format=None"):
        ends.take(receiver, ends.expected(NAMED), True)
    assert receiver.broken is None


def test_wrong_prefix(ends: Any, store: dist.TCPStore) -> None:
    """E8: a group of another name is not ours: the wait ends in time, and says what is there."""
    store.set("other_group/0/0", "somebody's address")
    for timeout in (0.6, 6.0, 30.0):  # torch's first contact with a store takes seconds at times
        with pytest.raises(EngineTimeoutError) as caught:
            ends.receiver(store.port, timeout=timeout)
        if "nobody answered" not in str(caught.value):
            break
    assert re.search(r"'weight_update_group' didn't appear.*there is other_group", str(caught.value))


@pytest.mark.parametrize("ending", ["goes away", "sends nothing"])
def test_raw_sender_that_fails_half_way(ends: Any, store: dist.TCPStore, ending: str) -> None:
    """E8: without an agreement nobody knows what is under way afterwards: the group must be joined again."""
    forming = ends.start(make, store, "weight_update_group")
    receiver = ends.receiver(store.port)
    raw = [forming.result(20)]
    del forming  # it holds the group as well
    half = threading.Event()
    taking = ends.start(ends.take, receiver, ends.expected(NAMED), False, 1.0, half.set)
    broadcast(raw[0], NAMED["a"])
    assert half.wait(20)
    if ending == "goes away":
        raw.clear()
    with pytest.raises(WeightUpdateError if ending == "goes away" else EngineTimeoutError):
        taking.result(20)
    with pytest.raises(
        EngineStateError, match=r"can't be used: a transfer failed.*init_weights_update_group"
    ):
        ends.take(receiver, ends.expected(NAMED), False)
    assert not receiver.alive()


def test_closing_under_a_running_broadcast(ends: Any, store: dist.TCPStore) -> None:
    """E8: `close` returns at once while a tensor is under way, and the transfer says that it was closed."""
    forming = ends.start(make, store, "weight_update_group")
    receiver, calls, running = ends.receiver(store.port), itertools.count(), threading.Event()
    forming.result(20)

    def check() -> None:
        if next(calls) > 2:  # the first is before the operation begins
            running.set()

    taking = ends.start(ends.take, receiver, ends.expected(NAMED), False, 15.0, check)
    assert running.wait(20)
    assert ends.seconds(receiver.close) < 1
    with pytest.raises(WeightUpdateError, match=r"it was closed.*init_weights_update_group"):
        taking.result(5)


def test_closing_between_two_tensors(ends: Any, store: dist.TCPStore) -> None:
    """E8: nothing more is received then, and the connections go once the receiver has noticed."""
    forming = ends.start(make, store, "weight_update_group")
    receiver = ends.receiver(store.port)
    raw = forming.result(20)
    steps = receiver.receive(ends.expected(NAMED), flattened=False, timeout=20.0)
    sending = ends.start(broadcast, raw, NAMED["a"])
    assert torch.equal(next(steps)[1], NAMED["a"])
    sending.result(20)
    assert ends.seconds(receiver.close) < 1
    with pytest.raises(WeightUpdateError, match="it was closed"):
        next(steps)
    receiver.acknowledge(None)
    with pytest.raises(RuntimeError):
        ends.start(broadcast, raw, LARGE).result(15)


def test_closing_between_transfer_and_acknowledgement(ends: Any, store: dist.TCPStore) -> None:
    """A transfer that has come whole is no failure; its connections go with its end."""
    forming = ends.start(make, store, "weight_update_group")
    receiver = ends.receiver(store.port)
    raw, one = forming.result(20), {"a": NAMED["a"]}
    sending = ends.start(broadcast, raw, NAMED["a"])
    steps = receiver.receive(ends.expected(one), flattened=False, timeout=20.0)
    next(steps)
    receiver.close()
    assert next(steps, None) is None
    receiver.acknowledge(None)
    sending.result(20)
    with pytest.raises(RuntimeError):
        ends.start(broadcast, raw, LARGE).result(15)
    with pytest.raises(EngineStateError, match="closed"):
        receiver.receive(ends.expected(one), flattened=False, timeout=20.0)
