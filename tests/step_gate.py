"""Steps of an engine, let through one by one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from tests.tiny import POSTED_WITHIN
from tokenspeed_rl import Engine


class StepGate:
    """An engine's steps, let through one by one: the loop stands before the next forward until told."""

    def __init__(self, engine: Engine) -> None:
        self._loop = engine.client._core.loop
        self._run, self._submit, self._call = self._loop.runner.run, self._loop.submit, self._loop.call
        self._arrivals, self._permits = threading.Semaphore(0), threading.Semaphore(0)
        self._submissions, self._commands = threading.Semaphore(0), threading.Semaphore(0)
        self._open = self._at_gate = False

    def __enter__(self) -> StepGate:
        loop: Any = self._loop
        loop.runner.run, loop.submit, loop.call = self._pass, self._count, self._count_command
        return self

    def __exit__(self, *_: object) -> None:
        self.open()
        loop: Any = self._loop
        loop.runner.run, loop.submit, loop.call = self._run, self._submit, self._call

    def wait(self) -> None:
        """Until the loop stands at the gate, all earlier steps done."""
        if not self._at_gate:
            assert self._arrivals.acquire(timeout=POSTED_WITHIN), "no step came"
            self._at_gate = True

    def step(self, count: int = 1) -> None:
        """Let `count` steps through, each as it comes; the last may still run on return."""
        for _ in range(count):
            self.wait()
            self._at_gate = False
            self._permits.release()

    def submitted(self, count: int = 1) -> None:
        """Until `count` more calls have submitted their requests."""
        for _ in range(count):
            assert self._submissions.acquire(timeout=POSTED_WITHIN), "nothing was submitted"

    def commanded(self, count: int = 1) -> None:
        """Until `count` more control calls are in the loop's inbox."""
        for _ in range(count):
            assert self._commands.acquire(timeout=POSTED_WITHIN), "no command came"

    def serve(self, done: Callable[[], bool]) -> None:
        """Let a step through whenever a command waits behind it, until `done`: no more steps than there are
        commands, however long the thread that gives them takes."""
        limit = time.monotonic() + POSTED_WITHIN
        while not done():
            assert time.monotonic() < limit, "the commands were not done"
            self._at_gate = self._at_gate or self._arrivals.acquire(blocking=False)
            if self._at_gate and self._loop._inbox:
                self._at_gate = False
                self._permits.release()
            time.sleep(0.001)

    def open(self) -> None:
        """Let everything through from now on."""
        self._open = True
        self._permits.release()

    def _pass(self, plan: Any) -> Any:
        self._arrivals.release()
        if not self._open:
            assert self._permits.acquire(timeout=POSTED_WITHIN), "the gate was left closed"
        return self._run(plan)

    def _count(self, *arguments: Any) -> None:
        self._submit(*arguments)
        self._submissions.release()

    def _count_command(self, command: Callable[[], Any]) -> Any:
        future = self._call(command)
        self._commands.release()
        return future
