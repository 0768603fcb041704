"""What a caller's own code raises is that caller's: nobody else notices."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest

from tokenspeed_rl import Engine
from tokenspeed_rl.errors import (
    EngineTimeoutError,
)
from tokenspeed_rl.requests import GenerateReqInput

WAIT = 20.0
GREEDY = {"temperature": 0, "max_new_tokens": 4}


class Broken(RuntimeError):
    """What a test makes the engine's insides raise."""


def test_a_failing_witness(counter: Engine, tiny: Any, pool: Any) -> None:
    """What a caller's own `on_finish` raises, even SystemExit, reaches that caller; its other samples are
    aborted, everyone else goes on."""
    for raised in (Broken("mine"), SystemExit(3), KeyboardInterrupt(), TimeoutError("mine")):

        def fail(raised: BaseException = raised) -> None:
            raise raised

        beside = pool.submit(counter.generate, input_ids=[5], sampling_params=GREEDY)
        obj = GenerateReqInput(
            input_ids=[[1], [2]], rid=["a", "b"], sampling_params=[GREEDY, {"max_new_tokens": 200}]
        )
        stream = counter.client.submit(obj, on_finish=fail)
        with pytest.raises(type(raised)) as caught:
            counter.llm.run(stream.result(timeout=WAIT), timeout=WAIT)
        assert not isinstance(caught.value, EngineTimeoutError)
        assert beside.result(WAIT)["output_ids"] == [6, 7, 8, 9]
        assert counter.get_load()[0].num_reqs == 0
    tiny.all_back(counter)


def test_a_witness_sees_every_end(counter: Engine) -> None:
    """`on_finish` is called once for each sample, on the event loop of whoever waits, also in a stream."""
    for stream in (False, True):
        threads: list[threading.Thread] = []
        obj = GenerateReqInput(input_ids=[[1], [2]], sampling_params={**GREEDY, "n": 3}, stream=stream)

        async def read(obj: GenerateReqInput = obj, threads: list[threading.Thread] = threads) -> None:
            def note() -> None:
                threads.append(threading.current_thread())

            async for _ in counter.client.submit(obj, on_finish=note):
                pass

        asyncio.run(read())
        assert threads == [threading.current_thread()] * 6


@pytest.mark.parametrize(
    "raised", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), Broken()], ids=repr
)
def test_a_failing_coroutine(counter: Engine, pool: Any, raised: BaseException) -> None:
    """Whatever a coroutine given to `LLM.run` raises comes out of `run`; the other callers go on."""
    started, go_on = threading.Event(), asyncio.Event()

    async def fail() -> None:
        raise raised

    async def stay() -> str:
        started.set()
        await go_on.wait()
        return "stayed"

    async def release() -> None:
        go_on.set()

    beside = pool.submit(counter.llm.run, stay())
    assert started.wait(WAIT)
    kind = type(raised) if not isinstance(raised, asyncio.CancelledError) else BaseException
    with pytest.raises(kind) as caught:
        counter.llm.run(fail(), timeout=WAIT)
    assert not isinstance(caught.value, EngineTimeoutError)
    counter.llm.run(release())
    assert beside.result(WAIT) == "stayed"
    assert counter.generate(input_ids=[5], sampling_params=GREEDY)["output_ids"] == [6, 7, 8, 9]


def test_a_command_whose_event_loop_is_closed(counter: Engine, step_gate: Any, caplog: Any) -> None:
    """A control call whose event loop was closed meanwhile bothers nobody: no failure, no log line."""
    loop = asyncio.new_event_loop()
    with step_gate(counter) as gate, caplog.at_level(logging.DEBUG):
        stream = counter.generate(input_ids=[5], sampling_params=GREEDY, stream=True)
        gate.wait()
        task = loop.create_task(counter.client.flush_cache())
        loop.run_until_complete(asyncio.sleep(0))
        gate.commanded()
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
        gate.open()
        assert [t for message in stream for t in message["output_ids"]] == [6, 7, 8, 9]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
