"""No stream outlives its consumer: what is closed, dropped or cancelled aborts its request."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from tokenspeed_rl import AsyncLLM, Engine
from tokenspeed_rl.requests import GenerateReqInput

WAIT = 20.0


async def drain(stream: AsyncIterator[dict[str, Any]]) -> list[int]:
    return [token async for message in stream for token in message["output_ids"]]


def leave_by_aclose(stream: Any) -> None:
    asyncio.run(stream.aclose())


def leave_by_break(stream: Any) -> None:
    async def read() -> None:
        async for _ in stream:
            break

    asyncio.run(read())


def leave_by_cancel(stream: Any) -> None:
    async def read() -> None:
        task = asyncio.create_task(drain(stream))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(read())


def leave_by_athrow(stream: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        asyncio.run(stream.athrow(ZeroDivisionError("the caller's")))


def leave_by_closing_the_event_loop(stream: Any) -> None:
    loop = asyncio.new_event_loop()
    task = loop.create_task(drain(stream))
    loop.run_until_complete(asyncio.sleep(0))  # it asks and waits
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()


def leave_by_dropping(stream: Any) -> None:
    """Its caller drops it."""


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_aclose,
        leave_by_break,
        leave_by_cancel,
        leave_by_athrow,
        leave_by_closing_the_event_loop,
        leave_by_dropping,
    ],
)
def test_abandoned_stream(counter: Engine, tiny: Any, step_gate: Any, leave: Any) -> None:
    """G7: a stream that is closed, broken out of, cancelled, dropped or whose event loop is closed aborts all
    its samples: none runs on, every page comes back and the engine serves the next call."""
    obj = GenerateReqInput(
        input_ids=[[9, 9], tiny.prompt(30)],
        sampling_params={"n": 2, "max_new_tokens": 200},
        stream=True,
    )
    with step_gate(counter) as gate:
        stream = counter.client.generate_request(obj)
        gate.step(3)
        gate.wait()
        leave(stream)
        del stream
        gc.collect()
        gate.open()
    tiny.all_back(counter)
    assert counter.generate(input_ids=[9], sampling_params={"temperature": 0, "max_new_tokens": 2})[
        "output_ids"
    ] == [10, 11]


@pytest.mark.parametrize("leave", ["close", "break", "drop"])
def test_abandoned_iterator(counter: Engine, tiny: Any, step_gate: Any, leave: str) -> None:
    """G7: the same for the blocking stream of `Engine.generate` and `LLM.generate_stream`; also one that was
    never asked for a message."""
    with step_gate(counter) as gate:
        streams = [counter.generate(input_ids=[t], rid=f"left{t}", stream=True) for t in (1, 2)]
        gate.step(2)
        gate.wait()
        for message in streams[0]:
            assert message["output_ids"]
            break
        if leave == "close":
            for stream in streams:
                stream.close()
        del streams
        if leave != "break":
            gc.collect()
        gate.open()
    tiny.all_back(counter)


def test_plain_call_whose_event_loop_is_closed(counter: Engine, tiny: Any, step_gate: Any) -> None:
    """G7: also a call without a stream ends when the event loop that waits for it is closed, long before its
    last token."""
    loop = asyncio.new_event_loop()
    before = tiny.state(counter)["output_tokens"]
    with step_gate(counter) as gate:
        task = loop.create_task(
            counter.async_generate(input_ids=[1], sampling_params={"max_new_tokens": 250})
        )
        loop.run_until_complete(asyncio.sleep(0))
        gate.submitted()
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
        gate.open()
        gate.wait()
    tiny.all_back(counter)
    assert tiny.state(counter)["output_tokens"] - before <= 3


def test_abandoning_does_not_end_a_namesake(counter: Engine, step_gate: Any) -> None:
    """A stream that is dropped ends its own samples only, not a newer request that uses its rid by now."""
    params = {"temperature": 0, "max_new_tokens": 5}
    with step_gate(counter) as gate:
        old = counter.client.generate_request(
            GenerateReqInput(input_ids=[[1], [2]], rid=["x", "y"], stream=True)
        )
        counter.abort("x")
        new = counter.generate(input_ids=[50], rid="x", sampling_params=params, stream=True)
        asyncio.run(old.aclose())
        gate.open()
        assert [t for m in new for t in m["output_ids"]] == [51, 52, 53, 54, 55]
        counter.generate(input_ids=[1], rid="y", sampling_params=params)


def test_a_stream_keeps_its_engine(tiny: Any) -> None:
    """A stream whose engine was dropped goes on to its end, and takes the engine with it then."""

    async def read() -> list[int]:
        client = AsyncLLM(tiny.successor(), max_total_tokens=256)
        stream = client.generate_request(GenerateReqInput(input_ids=[5], sampling_params=params, stream=True))
        threads.extend(thread for thread in threading.enumerate() if thread not in before)
        del client
        gc.collect()
        return await drain(stream)

    params, threads, before = (
        {"temperature": 0, "max_new_tokens": 5},
        list[threading.Thread](),
        threading.enumerate(),
    )
    assert asyncio.run(read()) == [6, 7, 8, 9, 10]
    gc.collect()
    for thread in threads:
        thread.join(WAIT)
    assert threads and not any(thread.is_alive() for thread in threads)


def test_streams_leave_the_random_state_alone(counter: Engine) -> None:
    """F14: neither streaming nor abandoning a stream touches torch's generator."""
    before = torch.random.get_rng_state()
    stream = counter.generate(input_ids=[1, 2], stream=True)
    next(stream)
    stream.close()
    assert torch.equal(before, torch.random.get_rng_state())
