"""Callers of a pause or release that give up, and requests that come or go, at any moment of a drain."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from tests.lifecycle.draining import GREEDY, Draining, at_rest, drains, release, revive, wait
from tests.lifecycle.rollouts import (
    WAIT,
    Posts,
    ask,
    begin,
    reason,
    settled,
    take,
)
from tests.step_gate import StepGate
from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.errors import (
    EngineStateError,
    EngineTimeoutError,
)
from tokenspeed_rl.requests import ReleaseMemoryOccupationReqInput


@drains
@pytest.mark.parametrize("how", ["timeout", "cancel"])
@pytest.mark.parametrize("before", [None, "keep"])
def test_a_caller_that_gives_up(one: Engine, pool: Any, drain: Any, how: str, before: str | None) -> None:
    """G7: a pause or release whose caller's timeout passes, or whose task is cancelled, is withdrawn: at once
    for whoever asks or generates, and nothing of it comes later. A pause goes back to the mode before."""
    if before is not None and drain is release:
        before = None  # a paused engine doesn't drain to release
    client = one.client
    with StepGate(one) as gate:
        if before is not None:
            one.pause(before)
        old = ask(one, [20], **GREEDY)
        if before is None:
            gate.wait()
        if how == "timeout":
            timed = {
                wait: lambda: one.pause("wait", timeout=0.05),
                release: lambda: one.release_memory_occupation(timeout=0.05),
            }[drain]
            with pytest.raises(EngineTimeoutError):
                timed()
        else:

            async def give_up() -> None:
                obj = ReleaseMemoryOccupationReqInput()
                doing = (
                    client.pause_scheduler(mode="wait")
                    if drain is wait
                    else client.release_memory_occupation(obj)
                )
                task = asyncio.ensure_future(doing)
                while Tiny.state(one)["draining"] is None and not one.client._core.loop._inbox:
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

            asyncio.run(give_up())
        assert client.pause_mode == before and Tiny.state(one)["draining"] is None
        new = ask(one, [40], **GREEDY)
        gate.open()
        settled(one)
        assert client.pause_mode == before and not one.is_sleeping()
        one.resume()
        assert at_rest(one)
    assert [r["output_ids"][-1] for r in take(one, old, new)] == [26, 46]
    Tiny.all_back(one)


def control(client: Any, what: str) -> Any:
    """A coroutine that pauses or releases."""
    if what == "release":
        return client.release_memory_occupation(ReleaseMemoryOccupationReqInput())
    return client.pause_scheduler(mode=what)


@pytest.mark.parametrize("what", ["wait", "release"])
def test_cancelled_during_the_last_step(one: Engine, what: str) -> None:
    """G7: a caller that is cancelled during the very step that ends the drain: withdrawn all the same."""
    with StepGate(one) as gate:
        old = ask(one, [20], max_new_tokens=4, **GREEDY)
        gate.wait()

        async def give_up() -> None:
            with Posts(one) as posts:
                task = asyncio.ensure_future(control(one.client, what))
                await asyncio.sleep(0)
                posts.wait()
            gate.step(3)
            gate.wait()  # before the forward that draws the last token
            assert Tiny.state(one)["draining"] is not None
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.step()

        asyncio.run(give_up())
    assert len(take(one, old)["output_ids"]) == 4
    settled(one)
    assert at_rest(one)


@pytest.mark.parametrize("before", [None, "keep", "retract"])
@pytest.mark.parametrize("mode", ["abort", "wait", "keep", "retract"])
def test_cancelled_before_the_answer_was_heard(one: Engine, mode: str, before: str | None) -> None:
    """G7: a pause that has been answered, but whose caller is cancelled before its event loop told it, is
    withdrawn at once: the mode is the one before, and requests run again if they ran then."""
    if before is not None:
        one.pause(before)

    async def give_up() -> None:
        with Posts(one) as posts:
            task = asyncio.ensure_future(control(one.client, mode))
            await asyncio.sleep(0)
            posts.wait()
        settled(one)  # this event loop stands still meanwhile
        assert one.client.pause_mode == mode
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert one.client.pause_mode == before

    asyncio.run(give_up())
    new = ask(one, [40], **GREEDY)
    settled(one)
    assert one.client.pause_mode == before and Tiny.state(one)["admission"] == (before or "running")
    one.resume()
    assert take(one, new)["output_ids"][-1] == 46


@drains
def test_answered_and_timed_out_at_once(one: Engine, pool: Any, drain: Any) -> None:
    """A timeout that passes when the answer is there, but not yet heard, doesn't deny what was done: the
    call succeeds."""
    standing, go_on = threading.Event(), threading.Event()

    async def stand_still() -> None:
        standing.set()
        go_on.wait(WAIT)

    with Posts(one) as posts:
        doing = pool.submit(
            (lambda: one.pause("wait", timeout=0.05))
            if drain is wait
            else (lambda: one.release_memory_occupation(timeout=0.05))
        )
        posts.wait()
        blocked = pool.submit(one.llm.run, stand_still())
        assert standing.wait(WAIT)
    asyncio.run(one.client.flush_cache())
    time.sleep(0.06)  # for the timeout
    go_on.set()
    blocked.result(WAIT)
    assert doing.result(WAIT) is (True if drain is wait else None)
    assert (one.is_paused(), one.is_sleeping()) == (drain is wait, drain is release)


@drains
def test_requests_that_end_otherwise(one: Engine, pool: Any, drain: Any) -> None:
    """Aborts of what is drained for end the drain; a request that was held and is aborted never runs."""
    with StepGate(one) as gate:
        drained = Draining(one, gate, pool, drain)
        held = [ask(one, [60], {"rid": "h"}, **GREEDY), ask(one, [80], **GREEDY)]
        one.abort("old1")
        one.abort("old2")
        one.abort("h")
        assert [reason(r) for r in take(one, *drained.old, held[0])] == ["abort"] * 3
        gate.step()
        assert drained.reply.result(WAIT) is (True if drain is wait else None)
        gate.open()
        revive(one)
        assert take(one, held[1])["output_ids"][-1] == 86
    Tiny.all_back(one)


@drains
def test_a_request_submitted_before_a_drain_begins(one: Engine, pool: Any, drain: Any) -> None:
    """Contract 5: a blocking generate that was let through, as a pause or release was called but had not yet
    begun, is drained for: it doesn't wait for a resume of which its caller, blocked, knows nothing."""
    with StepGate(one) as gate:
        old = ask(one, [20], **GREEDY)
        gate.wait()
        reply = begin(one, pool, drain, one)
        blocked = begin(
            one, pool, lambda: one.generate(input_ids=[40], sampling_params={"max_new_tokens": 6, **GREEDY})
        )
    assert blocked.result(WAIT)["output_ids"][-1] == take(one, old)["output_ids"][-1] + 20 == 46
    assert reply.result(WAIT) is (True if drain is wait else None)


def test_the_moment_between_drain_and_sleep(one: Engine) -> None:
    """While the memory is being released at the end of a drain, a blocking generate is refused still."""
    found: list[Any] = []
    part: Any = one.client._core.kv_memory
    free = part.release

    def release_and_ask() -> None:
        try:
            one.client.require_runnable()
        except EngineStateError as error:
            found.append(str(error))
        free()

    part.release = release_and_ask
    one.generate(input_ids=[1], sampling_params={"max_new_tokens": 1})
    one.release_memory_occupation("kv_cache")
    assert len(found) == 1 and "a release of kv_cache is waiting" in found[0]
