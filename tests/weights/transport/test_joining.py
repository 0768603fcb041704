"""Joining a weight group: who is missing, who disagrees, what no group can have."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tokenspeed_rl.errors import EngineShutdownError, EngineTimeoutError, RequestError
from tokenspeed_rl.requests import InitWeightsUpdateGroupReqInput
from tokenspeed_rl.weights.transport.group import WeightsGroup
from tokenspeed_rl.weights.transport.groups import Groups
from tokenspeed_rl.weights.transport.sender import WeightsSender

SHORT = 0.6
"""Seconds: the timeout of waits that are meant to time out."""
SLACK = 5.0
"""Seconds that a busy machine may add."""
NAMED = {"a": torch.ones(3, 2), "b": torch.zeros(5, dtype=torch.bfloat16)}


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port where something listens that never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def join(port: int, **fields: Any) -> WeightsGroup:
    return WeightsGroup("127.0.0.1", port, 1, 2, backend="gloo", **({"timeout": SHORT} | fields))


def fields(port: int, timeout: float = 20.0) -> InitWeightsUpdateGroupReqInput:
    return InitWeightsUpdateGroupReqInput(
        master_address="127.0.0.1",
        master_port=port,
        rank_offset=1,
        world_size=2,
        backend="gloo",
        timeout=timeout,
    )


def test_absent_sender(ends: Any) -> None:
    """E8: joining where nobody listens ends at the timeout, and says what was looked for where."""
    sender = ends.sender()
    port = sender.master_port
    sender.close()

    def act() -> None:
        with pytest.raises(
            EngineTimeoutError, match=rf"127.0.0.1:{port}.*'weight_update_group'.*refused.*0.6 s"
        ):
            join(port)

    assert SHORT <= ends.seconds(act) < SHORT + SLACK


def test_something_else_listens(ends: Any, silent_port: int) -> None:
    """E8: a listener that is no store can't hold the engine up."""

    def act() -> None:
        with pytest.raises(EngineTimeoutError, match=str(silent_port)):
            join(silent_port)

    assert ends.seconds(act) < SHORT + SLACK


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"group_name": "other"}, "group_name must be 'weight_update_group'.*'other'"),
        ({"world_size": 3}, r"world_size must be 2.*got 3"),
    ],
)
def test_ends_that_disagree_on_the_group(ends: Any, fields: dict[str, Any], message: str) -> None:
    """E8: a wrong group name or world size is named at once, with the sender's own."""
    sender = ends.sender()
    with pytest.raises(RequestError, match=message):
        WeightsGroup(**({"master_address": "127.0.0.1", "master_port": sender.master_port, "rank": 1,
                         "world_size": 2, "backend": "gloo", "timeout": 20} | fields))  # fmt: skip
    assert ends.works(sender, ends.receiver(sender))


def test_cancelled_while_joining(silent_port: int, ends: Any) -> None:
    """E8, E15: `check` ends the wait for a sender that isn't there, long before the timeout."""
    stop = ends.stop()
    joining = ends.start(join, silent_port, timeout=60, check=stop)
    assert stop.polled.wait(20)
    stop.now = True
    with pytest.raises(EngineShutdownError):
        joining.result(SLACK)


def test_groups_replace_what_is_broken(ends: Any) -> None:
    """E8: after its sender is gone a group is joined again under its name, without destroying it first."""
    groups, expected = Groups(), ends.expected(NAMED)
    ends.made.append(type("All", (), {"close": staticmethod(groups.close_all)}))

    def init(port: int, timeout: float = 20.0) -> None:
        groups.init(fields(port, timeout), device="cpu")

    first = ends.sender()
    init(first.master_port)
    first.close()
    with pytest.raises(EngineTimeoutError):
        init(first.master_port, SHORT)  # nobody there yet: the name is free afterwards
    second = ends.sender(master_port=first.master_port)
    init(second.master_port)
    sending = ends.start(second.send, NAMED)
    assert set(ends.take(groups.get("weight_update_group"), expected)) == set(NAMED)
    sending.result(30)


@pytest.mark.parametrize("answer", [True, False], ids=["it answers", "it is gone"])
@pytest.mark.parametrize("meanwhile", ["get", "destroy", "init"])
def test_a_group_stays_while_its_sender_is_asked(
    ends: Any, monkeypatch: pytest.MonkeyPatch, meanwhile: str, answer: bool
) -> None:
    """E8: joining under a taken name asks whether that group still works; until then it is there to all."""
    groups, name = Groups(), "weight_update_group"
    ends.made.append(type("All", (), {"close": staticmethod(groups.close_all)}))
    port = ends.sender().master_port
    held = groups.init(fields(port), device="cpu")
    asked, answered = threading.Event(), threading.Event()

    def alive(group: WeightsGroup) -> bool:
        asked.set()
        assert answered.wait(20)
        return answer

    monkeypatch.setattr(WeightsGroup, "alive", alive)
    again = ends.start(groups.init, fields(port), device="cpu")
    assert asked.wait(20)
    assert groups.get(name) is held and groups.names() == [name]
    if meanwhile == "destroy":
        groups.destroy(name)
    other = ends.start(groups.init, fields(port), device="cpu") if meanwhile == "init" else None
    answered.set()
    tries = [job.exception(20) for job in (again, other) if job is not None]
    if answer and meanwhile != "destroy":
        assert all(isinstance(error, RequestError) and "there already" in str(error) for error in tries)
        assert groups.get(name) is held and held.broken is None
    else:
        assert tries.count(None) == 1
        assert groups.get(name) is not held and held.broken is not None


def test_joining_while_the_engine_is_shut_down(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """E8: a group that is joined at last when all have been closed is closed too, and none is ever again."""
    groups, made = Groups(), list[WeightsGroup]()
    port = ends.sender().master_port

    def slow(*args: Any) -> WeightsGroup:
        made.append(WeightsGroup(*args))
        groups.close_all()
        return made[0]

    monkeypatch.setattr("tokenspeed_rl.weights.transport.groups.WeightsGroup", slow)
    for _ in range(2):
        with pytest.raises(EngineShutdownError, match="shut down"):
            groups.init(fields(port), device="cpu")
    assert [group.broken for group in made] == ["it was closed"]
    assert groups.names() == []


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"backend": "nccl"}, r"""'nccl' carries weights between GPUs only.*Pass backend="gloo\""""),
    ({"backend": "mpi"}, "backend must be 'gloo' or 'nccl'.*'mpi'"),
    ({"backend": None}, "backend must be"),
    ({"world_size": 1}, "world_size must be at least 2"),
    ({"world_size": "2"}, "world_size must be an integer"),
    ({"master_port": 70000}, "master_port must be in"),
    ({"master_port": "80"}, "master_port must be an integer"),
    ({"master_address": ""}, "master_address must be a non-empty string"),
    ({"master_address": "no.such.host.invalid"}, "no.such.host.invalid"),
    ({"group_name": 7}, "group_name must be a non-empty string"),
    ({"timeout": 0}, "timeout must be above 0"),
    ({"timeout": None}, "timeout must be"),
    ({"timeout": "5"}, "timeout must be"),
]


@pytest.mark.parametrize("end", ["sender", "receiver"])
@pytest.mark.parametrize("fields, message", WRONG, ids=[json.dumps(row[0]) for row in WRONG])
def test_arguments_that_no_group_can_have(ends: Any, end: str, fields: dict[str, Any], message: str) -> None:
    """Each bad argument is refused by name at both ends; NCCL on a CPU says what to pass instead."""
    good = {
        "master_address": "127.0.0.1",
        "master_port": 0,
        "world_size": 2,
        "backend": "gloo",
        "timeout": SHORT,
    }
    if end == "receiver":
        good |= {"rank": 1, "master_port": ends.sender().master_port}
    kinds = (RequestError, EngineTimeoutError) if "invalid" in message else RequestError  # as quick as DNS is
    with pytest.raises(kinds, match=message):
        (WeightsSender if end == "sender" else WeightsGroup)(**(good | fields))


def test_arguments_of_one_end(ends: Any) -> None:
    """Rank 0 is the sender's, ports are exclusive, and an address must be one interface of this machine."""
    sender = ends.sender()
    for rank in (0, 2, -1):
        with pytest.raises(RequestError, match="rank must be"):
            WeightsGroup("127.0.0.1", sender.master_port, rank, 2, backend="gloo", timeout=SHORT)
    with pytest.raises(RequestError, match="master_port must be"):
        WeightsGroup("127.0.0.1", 0, 1, 2, backend="gloo", timeout=SHORT)
    with pytest.raises(RequestError, match=r"in use.*master_port=0"):
        ends.sender(master_port=sender.master_port)
    with pytest.raises(RequestError, match="can't listen"):
        ends.sender(master_address="198.51.100.1")
    with pytest.raises(RequestError, match="one interface"):
        ends.sender(master_address="0.0.0.0")
    for wrong in ("weights", torch.ones(2), 5):
        with pytest.raises(RequestError, match="mapping or an iterable"):
            sender.send(wrong)
    with pytest.raises(RequestError, match="bucket_bytes"):
        sender.send(NAMED, bucket_bytes=0)
