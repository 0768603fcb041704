"""Shutdown wakes everybody who waits, whoever calls it and whatever runs."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from tokenspeed_rl import LLM, Engine
from tokenspeed_rl.errors import EngineShutdownError
from tokenspeed_rl.requests import GenerateReqInput

WAIT = 20.0
LONG = {"max_new_tokens": 200}
GREEDY = {"temperature": 0, "max_new_tokens": 4}


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("tokenspeed_rl")]


def wait_in_generate(engine: Engine) -> Any:
    return engine.generate(input_ids=[[1], [2]], sampling_params=LONG)


def wait_with_a_bar(engine: Engine) -> Any:
    return engine.generate(input_ids=[[1], [2]], sampling_params=LONG, use_tqdm=True)


def wait_in_client(engine: Engine) -> Any:
    return asyncio.run(engine.client.generate(GenerateReqInput(input_ids=[1], sampling_params=LONG)))


def wait_in_stream(engine: Engine) -> Any:
    return list(engine.generate(input_ids=[1], sampling_params=LONG, stream=True))


def wait_in_async_stream(engine: Engine) -> Any:
    async def read() -> None:
        async for _ in await engine.async_generate(input_ids=[1], sampling_params=LONG, stream=True):
            pass

    asyncio.run(read())


def wait_in_run(engine: Engine) -> Any:
    return engine.llm.run(engine.client.flush_cache())


def wait_in_command(engine: Engine) -> Any:
    return asyncio.run(engine.client.flush_cache())


def wait_for_anything(engine: Engine) -> Any:
    return engine.llm.run(asyncio.sleep(1000))


WAITERS = [
    wait_in_generate,
    wait_with_a_bar,
    wait_in_client,
    wait_in_stream,
    wait_in_async_stream,
    wait_in_run,
    wait_in_command,
    wait_for_anything,
]


def test_everyone_who_waits_is_woken(counting: Any, make_engine: Any, step_gate: Any, pool: Any) -> None:
    """G8: shutdown while callers wait, in every kind of call at once and while a step runs: each is woken
    with EngineShutdownError, before the step has ended, and so is each later call."""
    engine = make_engine(counting)
    in_run = threading.Event()

    async def announce() -> None:
        in_run.set()
        await asyncio.sleep(1000)

    with step_gate(engine) as gate:
        first = pool.submit(engine.generate, input_ids=[5], sampling_params=LONG)
        gate.step(2)
        gate.wait()
        waiting = [pool.submit(wait, engine) for wait in WAITERS[:-1]]
        waiting.append(pool.submit(engine.llm.run, announce()))
        gate.submitted(1 + 5)
        gate.commanded(1 + 2)  # the first is the KV cache's mapping
        assert in_run.wait(WAIT)
        ending = threading.Thread(target=engine.shutdown)
        ending.start()
        for waiter in (first, *waiting[:-1]):
            with pytest.raises(EngineShutdownError):
                waiter.result(WAIT)
        gate.open()
        ending.join(WAIT)
    assert not ending.is_alive()
    with pytest.raises(EngineShutdownError):
        waiting[-1].result(WAIT)
    for call in WAITERS:
        with pytest.raises(EngineShutdownError):
            call(engine)


def test_shutdown_from_several_threads(counting: Any, make_engine: Any, step_gate: Any, pool: Any) -> None:
    """G8: shutdown is idempotent; called by several threads at once, each returns when the engine is down."""
    before = set(engine_threads())
    engine = make_engine(counting)
    threads = set(engine_threads()) - before
    returned = []

    def end() -> None:
        engine.shutdown()
        returned.append([thread.is_alive() for thread in threads])

    with step_gate(engine) as gate:
        waiter = pool.submit(wait_in_generate, engine)
        gate.wait()
        ending = [pool.submit(end) for _ in range(4)]
        with pytest.raises(EngineShutdownError):
            waiter.result(WAIT)
        assert returned == [], "nobody returns while the step still runs"
        gate.open()
        for future in ending:
            future.result(WAIT)
    assert returned == [[False] * len(threads)] * 4 and len(threads) == 3
    with engine, engine:
        pass


def test_shutdown_from_inside(counting: Any, make_engine: Any) -> None:
    """G8: shutdown from a coroutine of the facade, and from a witness of its results, neither blocks nor
    harms."""
    engine = make_engine(counting)

    async def end() -> str:
        engine.shutdown()
        return "returned"

    with pytest.raises(EngineShutdownError):
        engine.llm.run(end(), timeout=WAIT)
        engine.llm.run(end(), timeout=WAIT)
    assert not engine.llm._thread.is_alive() or engine.llm._thread.join(WAIT) is None

    engine = make_engine(counting)
    stream = engine.client.submit(
        GenerateReqInput(input_ids=[[1], [2]], sampling_params=[GREEDY, LONG]), on_finish=engine.shutdown
    )
    with pytest.raises(EngineShutdownError):
        engine.llm.run(stream.result(), timeout=WAIT)
    with pytest.raises(EngineShutdownError):
        engine.generate(input_ids=[1])


def test_shutdown_against_a_coroutine_that_will_not_end(counting: Any, make_engine: Any, pool: Any) -> None:
    """G8: shutdown wakes the caller of a coroutine that swallows its cancellation, or blocks its thread."""
    engine = make_engine(counting)
    started, let_go = threading.Event(), threading.Event()

    async def block() -> None:
        started.set()
        let_go.wait(WAIT)

    waiter = pool.submit(engine.llm.run, block())
    assert started.wait(WAIT)
    ending = pool.submit(engine.shutdown)
    with pytest.raises(EngineShutdownError):
        waiter.result(WAIT)
    let_go.set()
    ending.result(WAIT)


def test_shutdown_ends_a_watch(tiny: Any, make_engine: Any) -> None:
    """After shutdown the optimizer that was watched steps on undisturbed."""
    model = tiny.successor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, other = make_engine(model), make_engine(model)
    for watching in (engine, other):
        watching.watch(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    engine.shutdown()
    optimizer.step()
    assert tiny.state(other)["weight_version"] == "2"


def test_shutdown_while_a_step_draws(counting: Any, make_engine: Any, step_gate: Any, pool: Any) -> None:
    """G8: what the running step draws after shutdown is dropped: the loop ends in peace, as shut down, not as
    failed."""
    engine = make_engine(counting)
    loop = engine.client._core.loop
    with step_gate(engine) as gate:
        waiter = pool.submit(engine.generate, input_ids=[1], sampling_params={"max_new_tokens": 1})
        gate.wait()
        ending = pool.submit(engine.shutdown)
        with pytest.raises(EngineShutdownError):
            waiter.result(WAIT)
        gate.open()
        ending.result(WAIT)
    assert loop._cause is None
    with pytest.raises(EngineShutdownError):
        engine.get_load()


def test_submissions_against_shutdown(counting: Any, make_engine: Any, pool: Any) -> None:
    """G8: calls that race shutdown get their result or EngineShutdownError; none is lost, five times over."""
    for _ in range(5):
        engine, barrier = make_engine(counting), threading.Barrier(5)
        engine.generate(input_ids=[1], sampling_params=GREEDY)

        def call(start: int, engine: Engine = engine, barrier: threading.Barrier = barrier) -> int:
            barrier.wait(WAIT)
            for done in range(1000):
                try:
                    result = engine.generate(input_ids=[start], sampling_params=GREEDY)
                except EngineShutdownError:
                    return done
                assert result["output_ids"] == list(range(start + 1, start + 5))
            raise AssertionError("it goes on after shutdown")

        callers = [pool.submit(call, start) for start in (10, 20, 30, 40)]
        barrier.wait(WAIT)
        engine.generate(input_ids=[1], sampling_params=GREEDY)
        engine.shutdown()
        assert all(caller.result(WAIT) >= 0 for caller in callers)


def test_shutdown_of_the_facade_alone(counting: Any, make_engine: Any, pool: Any) -> None:
    """`LLM.shutdown` ends the facade and wakes its callers; the AsyncLLM behind it goes on."""
    engine = make_engine(counting)
    facade, started = LLM(engine.client), threading.Event()

    async def stay() -> None:
        started.set()
        await asyncio.sleep(1000)

    waiter = pool.submit(facade.run, stay())
    assert started.wait(WAIT)
    facade.shutdown()
    facade.shutdown()
    with pytest.raises(EngineShutdownError):
        waiter.result(WAIT)
    with pytest.raises(EngineShutdownError):
        facade.run(engine.client.get_load())
    assert engine.generate(input_ids=[1], sampling_params=GREEDY)["output_ids"] == [2, 3, 4, 5]
