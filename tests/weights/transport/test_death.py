"""Processes that die or hang while weights are under way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tokenspeed_rl.errors import EngineTimeoutError, WeightUpdateError

PRELUDE = """
import os, sys, threading, time, torch
from tokenspeed_rl.weights.transport.group import WeightsGroup
from tokenspeed_rl.weights.transport.sender import WeightsSender
NAMED = {f"w{i}": torch.full((1000,), float(i)) for i in range(4)}
EXPECTED = [(name, tensor.dtype, tensor.shape) for name, tensor in NAMED.items()]
def say(word):
    print(word, flush=True)
"""
SENDER = """
sender = WeightsSender("127.0.0.1", 0, 2, backend="gloo", timeout=30)
say(sender.master_port)
for line in sys.stdin:
    if line == "send\\n":
        sender.send(NAMED)
    if line == "die half-way\\n":
        def source():
            yield from list(NAMED.items())[:2]
            os._exit(9)
        sender.send(source())
"""
RECEIVER = """
say("up")
group = WeightsGroup("127.0.0.1", int(sys.stdin.readline()), 1, 2, backend="gloo", timeout=30)
for name, _ in group.receive(EXPECTED, flattened=False, timeout=30):
    os._exit(9)
"""
EXITS = """
sender = WeightsSender("127.0.0.1", 0, 2, backend="gloo", timeout=30)
group = WeightsGroup("127.0.0.1", sender.master_port, 1, 2, backend="gloo", timeout=30)
stuck = threading.Event()
def source():
    yield "w0", NAMED["w0"]
    stuck.set()
    time.sleep(100)
threading.Thread(target=sender.send, args=(source(),), daemon=True).start()
class Cancelled(Exception): pass
def check():
    if stuck.is_set():
        raise Cancelled
try:
    for _ in group.receive(EXPECTED, flattened=False, timeout=30, check=check):
        pass
except Cancelled:
    say("cancelled")
"""
NAMED = {f"w{i}": torch.full((1000,), float(i)) for i in range(4)}
CHILDREN = {"sender": SENDER, "dying sender": SENDER, "dying receiver": RECEIVER, "exits": EXITS}


class Child:
    """A process with torch in it, told what to do line by line."""

    def __init__(self, code: str) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + code], stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, line: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()


@pytest.fixture(scope="module")
def children() -> Iterator[dict[str, Child]]:
    """All started at once: importing torch takes them seconds."""
    started = {name: Child(code) for name, code in CHILDREN.items()}
    yield started
    for child in started.values():
        child.process.kill()
        child.process.communicate(timeout=30)


def rejoins(ends: Any, port: int) -> bool:
    """Whether a new sender at the address of the dead one is found there."""
    sender = ends.sender(master_port=port)
    return bool(ends.works(sender, ends.receiver(sender)))


def test_receiver_dies_half_way(ends: Any, children: dict[str, Child]) -> None:
    """E8: the sender learns of it within its timeout, and serves the receiver that comes back."""
    child, sender = children["dying receiver"], ends.sender(timeout=15)
    assert child.hear() == "up"
    child.tell(sender.master_port)

    def act() -> None:
        with pytest.raises((WeightUpdateError, EngineTimeoutError)):
            sender.send(NAMED)

    assert ends.seconds(act) < 20
    assert child.process.wait(20) == 9
    assert ends.works(sender, ends.receiver(sender))


def test_sender_dies_half_way(ends: Any, children: dict[str, Child]) -> None:
    """E8: the receiver learns of it at once, names what to do, and joins the next sender there."""
    child = children["dying sender"]
    port = int(child.hear())
    group = ends.receiver(port)
    child.tell("die half-way")

    def act() -> None:
        with pytest.raises(WeightUpdateError, match=rf"127.0.0.1:{port} is gone.*init_weights_update_group"):
            ends.take(group, ends.expected(NAMED), False, timeout=60.0)

    assert ends.seconds(act) < 20
    assert group.broken is not None
    assert rejoins(ends, port)


def test_sender_that_hangs_then_is_killed(ends: Any, same: Any, children: dict[str, Child]) -> None:
    """E8: a sender that hangs, its rendezvous included, holds nobody up; a killed one is noticed at once."""
    child = children["sender"]
    port = int(child.hear())
    group = ends.receiver(port)
    child.tell("send")
    assert same(ends.take(group, ends.expected(NAMED)), NAMED)
    os.kill(child.process.pid, signal.SIGSTOP)

    def act() -> None:
        with pytest.raises((WeightUpdateError, EngineTimeoutError)):
            ends.take(group, ends.expected(NAMED), timeout=1.0)

    assert ends.seconds(act) < 8
    assert ends.seconds(group.close) < 1
    os.kill(child.process.pid, signal.SIGCONT)

    group = ends.receiver(port)  # to the same sender, which goes on
    child.tell("send")
    assert same(ends.take(group, ends.expected(NAMED)), NAMED)
    waiting = ends.start(ends.take, group, ends.expected(NAMED), True, 60.0)
    child.process.kill()
    with pytest.raises(WeightUpdateError, match="is gone"):
        waiting.result(20)
    assert not group.alive()
    assert rejoins(ends, port)


def test_exit_while_an_operation_is_stuck(children: dict[str, Child]) -> None:
    """A process that leaves with a broadcast nobody completes exits at once, with status 0 and no noise."""
    process = children["exits"].process
    out, err = process.communicate(timeout=40)
    assert (process.returncode, out, err) == (0, "cancelled\n", "")
