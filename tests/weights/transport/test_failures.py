"""What goes wrong between a sender and its receivers: both learn of it in time, and go on afterwards."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_rl.errors import (
    EngineShutdownError,
    EngineStateError,
    EngineTimeoutError,
    WeightUpdateError,
)
from tokenspeed_rl.weights.bucket import LAYOUT_LIMIT
from tokenspeed_rl.weights.transport import framing

SHORT = 0.6
"""Seconds: the timeout of waits that are meant to time out."""
PATIENT = 20.0
"""Seconds for what is meant to succeed: torch's first contact takes several at times."""
SLACK = 5.0
"""Seconds that a busy machine may add."""
NAMED = {"a": torch.ones(3, 2), "b": torch.zeros(5, dtype=torch.bfloat16), "c": torch.full((4,), 7.0)}


@pytest.mark.parametrize("flattened", [False, True])
def test_absent_receiver(ends: Any, flattened: bool) -> None:
    """E8: a send that nobody takes ends at the timeout, names the rank, and later sends work."""
    sender = ends.sender(timeout=SHORT)

    def act() -> None:
        with pytest.raises(EngineTimeoutError, match=r"ranks \[1\]"):
            sender.send(NAMED)

    assert SHORT <= ends.seconds(act) < SHORT + SLACK
    group = ends.receiver(sender)
    act()  # joined, but not receiving
    sender._timeout = PATIENT
    sending = ends.start(sender.send, NAMED)
    assert set(ends.take(group, ends.expected(NAMED), flattened)) == set(NAMED)
    sending.result(30)


def test_receiver_that_timed_out_is_not_sent_to(ends: Any, same: Any) -> None:
    """E8: a receiver that waited in vain has withdrawn: the next send waits for the next receive."""
    sender, group = ends.pair(timeout=SHORT)
    for _ in range(2):
        with pytest.raises(EngineTimeoutError, match="sent nothing"):
            ends.take(group, ends.expected(NAMED), timeout=SHORT)
        with pytest.raises(EngineTimeoutError, match="asked for nothing"):
            sender.send(NAMED)
    assert group.broken is None
    sender._timeout = PATIENT
    sending = ends.start(sender.send, NAMED)
    assert same(ends.take(group, ends.expected(NAMED)), NAMED)
    sending.result(30)


MISMATCHES: list[tuple[Any, str]] = [
    ({"a": NAMED["a"]}, r"2 missing at the sender \(b, c\)"),
    (NAMED | {"d": NAMED["a"], "e": NAMED["a"]}, r"2 unknown to the receivers \(d, e\)"),
    (
        NAMED | {"c": torch.ones(2, 2)},
        r"1 of another dtype or shape \(c is float32 \[2, 2\], not float32 \[4\]\)",
    ),
    (NAMED | {"b": torch.zeros(5)}, r"b is float32 \[5\], not bfloat16 \[5\]"),
    ([*NAMED.items(), ("a", NAMED["a"])], r"1 given twice \(a\)"),
    (NAMED | {"a": torch.ones(3, 2, device="meta")}, r"unfit \(a: on the meta device"),
]


@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.parametrize("wrong, message", MISMATCHES)
def test_other_weights_than_promised(ends: Any, wrong: Any, message: str, flattened: bool) -> None:
    """E2, E8: a set that isn't what receivers were told is refused at both ends before a byte moves."""
    sender, group = ends.pair()
    sending = ends.start(sender.send, wrong)
    steps = group.receive(ends.expected(NAMED), flattened=flattened, timeout=20)
    with pytest.raises(WeightUpdateError, match=message):
        next(steps)
    with pytest.raises(WeightUpdateError, match=message):
        sending.result(30)
    assert ends.works(sender, group)


def broken_off() -> Iterator[tuple[str, Tensor]]:
    yield "a", NAMED["a"]
    raise ValueError("the gather failed")


ITERATORS: list[tuple[str, Callable[[], Iterator[Any]], type[Exception], str]] = [
    ("raises", broken_off, ValueError, "the gather failed"),
    ("ends early", lambda: iter([*NAMED.items()][:1]), WeightUpdateError, r"ended early: 2 missing \(b, c\)"),
    (
        "mis-shaped",
        lambda: iter((NAMED | {"b": torch.ones(2)}).items()),
        WeightUpdateError,
        r"b is float32 \[2\]",
    ),
    (
        "too many",
        lambda: iter((NAMED | {"d": NAMED["a"]}).items()),
        WeightUpdateError,
        "goes on after the last.*d",
    ),
    ("no pair", lambda: iter([("a", NAMED["a"]), "b"]), WeightUpdateError, "item 1 is no"),
]


@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.parametrize(
    "source, kind, message", [row[1:] for row in ITERATORS], ids=[row[0] for row in ITERATORS]
)
def test_iterator_that_goes_wrong(
    ends: Any, source: Callable[[], Iterator[Any]], kind: type[Exception], message: str, flattened: bool
) -> None:
    """E8, E14: what an iterator does wrong half-way is raised at the sender, and told to the receiver."""
    sender, group = ends.pair()
    sending = ends.start(sender.send, source(), 1)
    with pytest.raises(WeightUpdateError, match=message):
        ends.take(group, ends.expected(NAMED), flattened)
    with pytest.raises(kind, match=message):
        sending.result(30)
    assert ends.works(sender, group)


def test_plain_iterator_in_another_order(ends: Any) -> None:
    """Without buckets an iterator must keep the receivers' order; the error says which name came instead."""
    sender, group = ends.pair()
    sending = ends.start(sender.send, reversed(NAMED.items()))
    with pytest.raises(WeightUpdateError, match="c came where a was expected"):
        ends.take(group, ends.expected(NAMED), flattened=False)
    with pytest.raises(WeightUpdateError, match="c came where a was expected"):
        sending.result(30)
    assert ends.works(sender, group)


@pytest.mark.parametrize("flattened", [False, True])
def test_receiver_that_fails_half_way(ends: Any, flattened: bool) -> None:
    """E8: the engine's error reaches the sender's `send`, with its reason, also when data is under way."""
    sender, group = ends.pair()
    large = {f"w{i}": torch.zeros(1 << 20) for i in range(6)}
    sending = ends.start(sender.send, large, 1 << 20)
    steps = group.receive(ends.expected(large), flattened=flattened, timeout=20)
    next(steps)
    steps.close()
    group.acknowledge(WeightUpdateError("slot 7 is on fire"))
    with pytest.raises(WeightUpdateError, match=r"rank 1.*slot 7 is on fire"):
        sending.result(30)
    assert ends.works(sender, group)


def test_one_receiver_of_two_fails(ends: Any) -> None:
    """Either all receivers have an update or the sender raises; the others hear why and can go on."""
    sender = ends.sender(world_size=3)
    one, two = (ends.receiver(sender, rank, world_size=3) for rank in (1, 2))
    go = threading.Event()

    def source() -> Iterator[tuple[str, Tensor]]:
        yield "a", NAMED["a"]
        assert go.wait(20)
        yield from list(NAMED.items())[1:]

    sending = ends.start(sender.send, source())
    other = ends.start(ends.take, two, ends.expected(NAMED), False)
    next(one.receive(ends.expected(NAMED), flattened=False, timeout=20))
    one.acknowledge(ValueError("rank one stumbled"))
    go.set()
    for job in (sending, other):
        with pytest.raises(WeightUpdateError, match="rank 1: ValueError: rank one stumbled"):
            job.result(30)
    sending = ends.start(sender.send, NAMED)
    takes = [ends.start(ends.take, group, ends.expected(NAMED)) for group in (one, two)]
    assert [set(take.result(30)) for take in takes] == [set(NAMED)] * 2
    sending.result(30)


def test_receivers_that_were_told_different_things(ends: Any) -> None:
    """Ranks that expect different weights are refused together."""
    sender = ends.sender(world_size=3)
    one, two = (ends.receiver(sender, rank, world_size=3) for rank in (1, 2))
    jobs = [
        ends.start(sender.send, NAMED),
        ends.start(ends.take, one, ends.expected(NAMED)),
        ends.start(ends.take, two, ends.expected({"a": NAMED["a"]})),
    ]
    for job in jobs:
        with pytest.raises(WeightUpdateError, match="ranks 1 and 2 were told to expect different weights"):
            job.result(30)


@pytest.mark.parametrize("first", ["send", "refuse"])
def test_refusal_reaches_the_sender(ends: Any, first: str) -> None:
    """E12: an engine that can't update now says why; the sender raises that, once, and nothing moves."""
    sender, group = ends.pair()
    refusal = EngineStateError("the weights are asleep")
    if first == "refuse":
        group.refuse(refusal, timeout=20)
    sending = ends.start(sender.send, NAMED)
    if first == "send":
        group.refuse(refusal, timeout=20)
    with pytest.raises(WeightUpdateError, match="rank 1 refused: EngineStateError: the weights are asleep"):
        sending.result(30)
    assert ends.works(sender, group)


def test_refusing_a_second_update_leaves_the_first_alone(ends: Any, same: Any) -> None:
    """An engine that is asked for two updates at once refuses one of them; the other goes on."""
    sender, group = ends.pair()
    sending = ends.start(sender.send, NAMED)
    got = {}
    for name, tensor in group.receive(ends.expected(NAMED), flattened=False, timeout=20):
        group.refuse(EngineStateError("an update is under way"), timeout=20)
        got[name] = tensor
    group.refuse(EngineStateError("an update is under way"), timeout=20)
    group.acknowledge(None)
    sending.result(30)
    assert same(got, NAMED)


def test_old_refusals_are_forgotten(ends: Any) -> None:
    """A refusal that no send heard in its time, or that the next receive overtook, stops nothing later."""
    sender, group = ends.pair()
    group.refuse(ValueError("too late"), timeout=0.0)
    sending = ends.start(sender.send, NAMED)
    assert set(ends.take(group, ends.expected(NAMED))) == set(NAMED)
    sending.result(30)
    group.refuse(ValueError("overtaken"), timeout=20)
    taking = ends.start(ends.take, group, ends.expected(NAMED), True, 20.0, polled := ends.stop())
    assert polled.polled.wait(20)
    sender.send(NAMED)
    assert set(taking.result(30)) == set(NAMED)


@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.parametrize("moment", ["before anything came", "in the middle"])
def test_cancelled_while_receiving(ends: Any, moment: str, flattened: bool) -> None:
    """E8, E15: `check` ends every wait of a transfer, the sender hears of it, and the next one works."""
    sender, group, stop, go = *ends.pair(), ends.stop(), threading.Event()

    def source() -> Iterator[tuple[str, Tensor]]:
        yield "a", NAMED["a"]
        stop.now = True
        assert go.wait(20)
        yield from list(NAMED.items())[1:]

    taking = ends.start(ends.take, group, ends.expected(NAMED), flattened, 60.0, stop)
    if moment == "in the middle":
        sending = ends.start(sender.send, source(), 1)
    else:
        assert stop.polled.wait(20)
        stop.now = True
    with pytest.raises(EngineShutdownError):
        taking.result(SLACK)
    go.set()
    if moment == "in the middle":
        with pytest.raises(WeightUpdateError, match="EngineShutdownError: the engine was shut down"):
            sending.result(30)
    assert ends.works(sender, group)


@pytest.mark.parametrize("forge", ["length", "text", "stranger", "dtype", "size"])
def test_damaged_framing(ends: Any, monkeypatch: pytest.MonkeyPatch, forge: str) -> None:
    """A sender is believed in nothing: wrong lengths, layouts and names end the transfer, not the process."""
    sender, group = ends.pair()
    encode = framing.encode_layout

    def forged(layout: Any) -> bytes:
        rows = json.loads(encode(layout))
        if forge == "length":
            return b" " * (LAYOUT_LIMIT + 1)
        if forge == "text":
            return b"\x80\x04not json"
        if forge == "stranger":
            rows[0][0] = "stranger"
        if forge == "dtype":
            rows[0][1] = "float16"
        if forge == "size":
            rows[-1][3] += 1 << 40
        return json.dumps(rows).encode()

    monkeypatch.setattr(framing, "encode_layout", forged)
    sending = ends.start(sender.send, NAMED)
    with pytest.raises(WeightUpdateError):
        ends.take(group, ends.expected(NAMED))
    with pytest.raises(WeightUpdateError, match="failed at a receiver, rank 1: WeightUpdateError"):
        sending.result(30)
    monkeypatch.undo()
    assert ends.works(sender, group)
