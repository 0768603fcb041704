"""Whole lives of engines: beside another one, anywhere, to their end; and callers that wait through them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.lifecycle.rollouts import (
    EXACT,
    WAIT,
    StuckUpdate,
    ask,
    begin,
    labels,
    owner,
    push,
    reason,
    settled,
    span_gap,
    take,
)
from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.errors import (
    EngineDeadError,
    EngineShutdownError,
    EngineStateError,
    WeightsInvalidError,
)
from tokenspeed_rl.requests import (
    GenerateReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightsFromTensorReqInput,
)


@pytest.mark.parametrize("how", ["shutdown", "failure"])
@pytest.mark.parametrize("state", ["paused", "asleep", "updating"])
def test_the_engine_ends_meanwhile(make_engine: Any, models: Any, pool: Any, state: str, how: str) -> None:
    """G3, G8: an engine that is paused, asleep or being updated is shut down, or its loop fails: everyone who
    waits is told, the update too, and so is every later call."""
    engine = owner(make_engine, models["W0"])
    error = EngineShutdownError if how == "shutdown" else EngineDeadError
    engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 1})
    if state == "paused":
        engine.pause("keep")
    elif state == "asleep":
        engine.release_memory_occupation()
    waiting = []
    if state == "updating":
        stuck = StuckUpdate(engine, models["W1"], pool)
        assert stuck.standing.wait(WAIT)
        waiting.append(stuck.reply)
    request = begin(engine, pool, lambda: engine.generate(input_ids=[1], wait=True))
    waiting.append(request)
    if how == "shutdown":
        engine.shutdown()
    else:
        loop: Any = engine.client._core.loop
        with loop.lock:
            loop._post(lambda: 1 / 0, None)
    if state == "updating":
        stuck.go_on.set()
    for reply in waiting:
        with pytest.raises(error):
            reply.result(WAIT)
    for call in (
        engine.pause,
        engine.resume,
        engine.release_memory_occupation,
        engine.resume_memory_occupation,
        lambda: push(engine, models["W1"]),
        lambda: engine.generate(input_ids=[1], wait=True),
    ):
        with pytest.raises(error):
            call()
    engine.abort()
    assert engine.is_paused() == (state == "paused") and engine.is_sleeping() == (state == "asleep")


@pytest.mark.parametrize("state", ["paused", "asleep", "invalid"])
@pytest.mark.parametrize("how", ["timeout", "cancelled", "dropped"])
def test_who_gives_up_waiting(make_engine: Any, models: Any, state: str, how: str) -> None:
    """G7: a request whose caller gives up while nothing runs, by a timeout, a cancelled task or a dropped
    stream, is aborted; its id is free, and after the resume nothing of it is left."""
    engine = owner(make_engine, models["W0"])
    if state == "paused":
        engine.pause("retract")
    else:
        engine.release_memory_occupation("weights" if state == "invalid" else None)
    if state == "invalid":
        engine.resume_memory_occupation()
    params: dict[str, Any] = {"max_new_tokens": 3}
    for _ in range(2):
        if how == "timeout":
            with pytest.raises(TimeoutError):
                engine.generate(input_ids=[1], rid="r", sampling_params=params, wait=True, timeout=0.02)
        elif how == "cancelled":

            async def cancel() -> None:
                task = asyncio.ensure_future(
                    engine.async_generate(input_ids=[1], rid="r", sampling_params=params, wait=True)
                )
                await asyncio.sleep(0)
                assert engine.get_load()[0].num_reqs == 1
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

            asyncio.run(cancel())
        else:
            stream = engine.generate(input_ids=[1], rid="r", sampling_params=params, wait=True, stream=True)
            assert engine.get_load()[0].num_reqs == 1
            del stream
            settled(engine)
        assert engine.get_load()[0].num_reqs == 0
    engine.resume()
    if state == "asleep":
        engine.resume_memory_occupation()
    if state != "paused":
        push(engine, models["W1"], "W1")
    assert len(engine.generate(input_ids=[1], rid="r", sampling_params=params)["output_ids"]) == 3
    Tiny.all_back(engine)


def test_refused_blocking_calls_say_why(make_engine: Any, models: Any) -> None:
    """Contract 5: a blocking generate is refused asleep, invalid and paused, in that order of reasons, with
    what to do; the same with `wait=True` waits, through all three, for one result."""
    engine = owner(make_engine, models["W0"])
    engine.pause("keep")
    engine.release_memory_occupation()
    waiting = ask(engine, [1, 2, 3])
    with pytest.raises(EngineStateError, match="sleeps: weights, kv_cache, cuda_graph released"):
        engine.generate(input_ids=[1])
    engine.resume_memory_occupation("weights")
    with pytest.raises(EngineStateError, match="sleeps: kv_cache, cuda_graph released"):
        engine.llm.generate(GenerateReqInput(input_ids=[1]))
    engine.resume_memory_occupation()
    with pytest.raises(WeightsInvalidError, match="released without a backup"):
        engine.generate(input_ids=[1], stream=True)
    push(engine, models["W1"], "W1")
    with pytest.raises(EngineStateError, match=r"paused \(keep\)"):
        engine.generate(input_ids=[1])
    assert engine.get_load()[0].num_reqs == 1
    started = time.monotonic()
    engine.resume()
    result = take(engine, waiting)
    assert result["meta_info"]["e2e_latency"] >= time.monotonic() - started - WAIT
    assert span_gap(models, [1, 2, 3], result) < EXACT


@pytest.mark.parametrize("where", ["thread", "event loop"])
def test_a_whole_life_anywhere(models: Any, where: str) -> None:
    """G1: an engine made in a thread, or under a running event loop, pauses, sleeps, wakes and updates there,
    by its blocking face and by its asynchronous one."""
    prompt = Tiny.prompt(8)

    def blocking() -> list[Any]:
        with Engine(models["W0"].config, device="cpu", max_total_tokens=512) as engine:
            push(engine, models["W0"], "W0")
            with engine.paused("retract"):
                streams = [ask(engine, prompt)]
                engine.release_memory_occupation()
                engine.resume_memory_occupation("weights")
                push(engine, models["W1"], "W1")
                engine.resume_memory_occupation()
            return [take(engine, stream) for stream in streams]

    async def awaited() -> list[Any]:
        with Engine(models["W0"].config, device="cpu", max_total_tokens=512) as engine:
            client, whole = engine.client, ReleaseMemoryOccupationReqInput()
            task = asyncio.ensure_future(
                client.generate(GenerateReqInput(input_ids=prompt, return_logprob=True))
            )
            await asyncio.sleep(0)
            assert await client.pause_scheduler(mode="retract")
            await client.release_memory_occupation(whole)
            await client.resume_memory_occupation(ResumeMemoryOccupationReqInput())
            obj = UpdateWeightsFromTensorReqInput(
                named_tensors=models["W1"].named_parameters(), weight_version="W1"
            )
            assert (await client.update_weights_from_tensor(obj))[0] is True
            assert await client.resume_scheduler()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            return [await engine.async_generate(input_ids=prompt, return_logprob=True), *blocking()]

    results: list[Any] = []
    if where == "thread":
        thread = threading.Thread(target=lambda: results.extend(blocking()))
        thread.start()
        thread.join(WAIT)
    else:
        results = asyncio.run(awaited())
    assert results and max(span_gap(models, prompt, result) for result in results) < EXACT


def test_two_engines(make_engine: Any, models: Any) -> None:
    """G9: two engines on one event loop, one asleep, paused or updated: the other knows nothing of it."""
    one, other = owner(make_engine, models["W0"]), owner(make_engine, models["W0"])
    prompt = Tiny.prompt(8)

    def pairs() -> Iterator[Any]:
        for pair in models["W1"].named_parameters():
            assert reason(other.generate(input_ids=prompt, sampling_params={"max_new_tokens": 1})) == "length"
            assert other.pause("keep") and other.resume()  # only the updated engine's calls are refused
            yield pair

    before = take(other, ask(other, prompt, temperature=0))["output_ids"]
    one.release_memory_occupation()
    for change in (lambda: one.pause("retract"), lambda: one.resume_memory_occupation(), lambda: None):
        change()
        assert not (other.is_paused() or other.is_sleeping())
        assert take(other, ask(other, prompt, temperature=0))["output_ids"] == before
    one.update_weights_from_tensor(pairs(), weight_version="W1")
    one.resume()
    assert span_gap(models, prompt, take(one, ask(one, prompt))) < EXACT
    assert labels(take(other, ask(other, prompt, temperature=0))) == [("W0", 0, 6)]
    one.shutdown()
    assert take(other, ask(other, prompt, temperature=0))["output_ids"] == before
