"""Engines with a drain pending: a pause that waits, or the release of a running engine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from tests.lifecycle.rollouts import (
    WAIT,
    ask,
    begin,
)
from tests.step_gate import StepGate
from tests.tiny import Tiny
from tokenspeed_rl import Engine

GREEDY: dict[str, Any] = {"temperature": 0}


def wait(engine: Engine) -> bool:
    """Pause and wait."""
    return engine.pause("wait")


def release(engine: Engine) -> None:
    """Give everything back."""
    engine.release_memory_occupation()


DRAINS: list[Callable[[Engine], Any]] = [wait, release]
NAMES = {wait: "a pause that waits", release: "a release of weights, kv_cache, cuda_graph"}
drains = pytest.mark.parametrize("drain", DRAINS, ids=lambda drain: drain.__name__)


def at_rest(engine: Engine) -> bool:
    """Whether `engine` runs as if nothing had been asked of it."""
    state = Tiny.state(engine)
    return (
        (state["admission"], state["draining"]) == ("running", None)
        and set(state["residency"].values()) == {"resident"}
        and not (engine.is_paused() or engine.is_sleeping())
    )


def revive(engine: Engine) -> None:
    """Awake and running again."""
    engine.resume()
    engine.resume_memory_occupation()
    assert at_rest(engine)


class Draining:
    """A shared engine with one request in flight and one queued, at the gate, a drain of its pending."""

    def __init__(self, engine: Engine, gate: StepGate, pool: Any, drain: Callable[[Engine], Any]) -> None:
        self.engine, self.gate, self.pool = engine, gate, pool
        self.old = [ask(engine, [20 * number], {"rid": f"old{number}"}, **GREEDY) for number in (1, 2)]
        gate.step()
        gate.wait()
        self.reply: Future[Any] = begin(engine, pool, drain, engine)
        gate.step()
        gate.wait()

    def served(self, call: Callable[..., Any], *args: Any) -> Any:
        """The result of a call that needs the loop, which takes a step for it."""
        future = begin(self.engine, self.pool, call, *args)
        if not future.done():
            self.gate.step()
        return future.result(WAIT)
