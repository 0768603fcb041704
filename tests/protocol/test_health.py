"""`is_server_starting`, `mark_server_up`, `mark_server_unhealthy`, and the watchdog."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.step_gate import StepGate
from tests.tiny import Tiny
from tokenspeed_rl import AsyncLLM, Engine
from tokenspeed_rl.core import model_source
from tokenspeed_rl.errors import EngineShutdownError, EngineStateError

WAIT = 20.0
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 4}
MakeEngine = Callable[..., Engine]


class Clock:
    """Time goes on when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(make_engine: MakeEngine, counting: Any) -> tuple[Engine, Clock]:
    """An engine whose watchdog has a clock of the test's, and that clock."""
    engine, made = make_engine(counting, watchdog_timeout=None), Clock()
    engine.client._core.watch.watchdog._clock = made
    return engine, made


def health(engine: Engine) -> dict[str, Any]:
    return dict(Tiny.state(engine)["health"])


def test_starting_then_up(counting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """True while the constructor runs, seen from elsewhere; then up."""
    seen: list[bool] = []
    client = AsyncLLM.__new__(AsyncLLM)
    made = model_source.open_model

    def slow(*arguments: Any) -> Any:
        seen.append(client.is_server_starting())
        return made(*arguments)

    monkeypatch.setattr("tokenspeed_rl.core.engine_core.open_model", slow)
    client.__init__(counting, max_total_tokens=256)  # type: ignore[misc]
    try:
        assert seen == [True] and not client.is_server_starting()
        assert client.health()["status"] == "up"
    finally:
        client.shutdown()


def test_marked_unhealthy_then_up(
    counter: Engine, pool: ThreadPoolExecutor, step_gate: type[StepGate]
) -> None:
    """New requests are refused, with the reason; those in flight go on; control calls are served; and up
    again it accepts."""
    with step_gate(counter) as gate:
        running = pool.submit(counter.generate, input_ids=[5], sampling_params=GREEDY)
        gate.wait()
        counter.client.mark_server_unhealthy()
        counter.client.mark_server_unhealthy()
        with pytest.raises(EngineStateError, match=r"marked unhealthy.*mark_server_up"):
            counter.generate(input_ids=[1], sampling_params=GREEDY)
        shown = health(counter)
        assert shown["status"] == "unhealthy" and "mark_server_unhealthy" in shown["reason"]
        assert 0 <= shown["seconds"] < WAIT and not counter.client.is_server_starting()
        gate.open()
        assert running.result(WAIT)["output_ids"] == [6, 7, 8, 9]
    assert counter.pause("keep") and counter.resume()
    counter.client.mark_server_up()
    assert health(counter)["status"] == "up" and health(counter)["reason"] is None
    assert counter.generate(input_ids=[5], sampling_params=GREEDY)["output_ids"] == [6, 7, 8, 9]


def test_a_step_that_does_not_return(
    clock: tuple[Engine, Clock], pool: ThreadPoolExecutor, step_gate: type[StepGate]
) -> None:
    """Unhealthy, with what and for how long; new requests are refused, whoever marks it up; what reads state
    answers; and it recovers by itself when the step returns."""
    engine, now = clock
    engine.set_internal_state(watchdog_timeout=30.0)
    with step_gate(engine) as gate:
        running = pool.submit(engine.generate, input_ids=[5], sampling_params=GREEDY)
        gate.wait()
        now.now += 29.0
        assert health(engine)["status"] == "up"
        now.now += 3.0
        shown = health(engine)
        assert shown["status"] == Tiny.state(engine)["status"] == "unhealthy" and shown["seconds"] == 32.0
        assert shown["reason"] == "a step has not returned for 32.0 s"
        engine.client.mark_server_up()
        with pytest.raises(EngineStateError, match=r"stuck: a step has not returned for 32.0 s"):
            engine.generate(input_ids=[1], sampling_params=GREEDY)
        assert engine.get_load()[0].num_reqs == 1
        engine.abort()
        assert running.result(WAIT)["meta_info"]["finish_reason"]["type"] == "abort"
        gate.open()
    engine.flush_cache()
    assert health(engine)["status"] == "up"
    assert engine.generate(input_ids=[5], sampling_params=GREEDY)["output_ids"] == [6, 7, 8, 9]


def test_a_command_that_does_not_return(clock: tuple[Engine, Clock]) -> None:
    """The same; and with `watchdog_timeout=None` nothing is ever stuck."""
    engine, now = clock
    begun, go_on = threading.Event(), threading.Event()
    doing = engine.client._core.loop.call(lambda: begun.set() or go_on.wait(WAIT))
    assert begun.wait(WAIT)
    now.now += 1e6
    assert health(engine)["status"] == "up"
    engine.client._core.watch._thread.set_timeout(30.0)
    assert health(engine)["reason"].startswith("a command has not returned for 1000000.0 s")
    go_on.set()
    assert doing.result(WAIT)
    engine.flush_cache()
    assert health(engine)["status"] == "up"


def test_the_log_says_where_it_is_stuck(make_engine: MakeEngine, counting: Any, pool: Any) -> None:
    """One error with the stack of the loop's thread, and one warning when it is free again. Nothing is ended
    by it; the watchdog ends with its engine."""
    before = set(threading.enumerate())
    engine = make_engine(counting)
    said: list[tuple[int, str]] = []
    told = {logging.ERROR: threading.Event(), logging.WARNING: threading.Event()}

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append((record.levelno, record.getMessage()))
            told[record.levelno].set()

    go_on = threading.Event()

    def never_returning_model(plan: Any) -> Any:
        assert go_on.wait(WAIT)
        loop.runner.run = run
        return run(plan)

    loop: Any = engine.client._core.loop
    run, loop.runner.run = loop.runner.run, never_returning_model
    logger, handler = logging.getLogger("tokenspeed_rl"), Handler()
    logger.addHandler(handler)
    try:
        engine.set_internal_state(watchdog_timeout=0.05)
        running = pool.submit(engine.generate, input_ids=[5], sampling_params=GREEDY)
        assert told[logging.ERROR].wait(WAIT)
        engine.client._core.watch._thread.set_timeout(60.0)
        go_on.set()
        assert running.result(WAIT)["output_ids"] == [6, 7, 8, 9]
        engine.set_internal_state(watchdog_timeout=60.0)  # it looks at once
        assert told[logging.WARNING].wait(WAIT)
    finally:
        go_on.set()
        logger.removeHandler(handler)
    (level, text), (later, again) = said
    assert (level, later) == (logging.ERROR, logging.WARNING)
    assert "a step has not returned" in text and "never_returning_model" in text and "step" in again
    engine.shutdown()
    assert "tokenspeed_rl-watchdog" not in {thread.name for thread in set(threading.enumerate()) - before}
    with pytest.raises(EngineShutdownError):
        engine.client.mark_server_up()
    assert not engine.client.is_server_starting()
