"""Calls of other threads while a step, a drain or an update goes on: answered or refused, never stuck."""

from __future__ import annotations

import asyncio
import threading
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
from tests.step_gate import StepGate
from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.errors import (
    EngineStateError,
)

GREEDY: dict[str, Any] = {"temperature": 0}
SOON = 1.0
"""Seconds that the contract gives to status calls and aborts."""


def status(engine: Engine) -> dict[str, Any]:
    """Every status call, blocking and not; the state it reports."""

    async def ask_client() -> list[Any]:
        client = engine.client
        return [
            await client.is_scheduler_paused(),
            await client.is_sleeping(),
            await client.get_load(),
            await client.get_internal_state(),
        ]

    paused, sleeping, load, state = asyncio.run(ask_client())
    assert (engine.is_paused(), engine.is_sleeping()) == (paused, sleeping)
    assert engine.get_load() == load and engine.get_internal_state()[0]["admission"] == state[0]["admission"]
    assert set(engine.memory_report()) == {"weights", "kv_cache", "cuda_graph", "untagged"}
    assert not engine.client.is_server_starting()
    found: dict[str, Any] = state[0]
    return found


@pytest.mark.parametrize("mode", [None, "abort", "wait", "keep", "retract"])
def test_while_a_step_is_held(make_engine: Any, counting: Any, pool: Any, mode: str | None) -> None:
    """G2: while a step takes long, with or without a control call behind it, status calls answer within a
    second from any thread, and an abort wakes its waiter; the call behind is answered after the step."""
    engine = make_engine(counting)
    with StepGate(engine) as gate:
        waiting = pool.submit(engine.generate, input_ids=[1], rid="w", sampling_params={"max_new_tokens": 50})
        gate.step(3)
        gate.wait()
        behind = None if mode is None else begin(engine, pool, engine.pause, mode)
        assert pool.submit(status, engine).result(SOON)["num_running"] == 1
        engine.abort("w")
        result = waiting.result(SOON)
        assert (reason(result), len(result["output_ids"])) == ("abort", 3)
        assert behind is None or not behind.done()
        gate.open()
        assert behind is None or behind.result(WAIT) is True
    engine.resume()
    Tiny.all_back(engine)


def test_while_a_drain_is_pending(make_engine: Any, counting: Any, pool: Any) -> None:
    """G2: the same while a release waits for a request to end: the abort of that ends the drain."""
    engine = make_engine(counting)
    with StepGate(engine) as gate:
        waiting = pool.submit(
            engine.generate, input_ids=[1], rid="w", sampling_params={"max_new_tokens": 200}
        )
        gate.step()
        gate.wait()
        reply = begin(engine, pool, engine.release_memory_occupation)
        gate.step()
        gate.wait()
        state = pool.submit(status, engine).result(SOON)
        assert state["draining"].startswith("a release of") and state["admission"] == "running"
        engine.abort("w")
        assert reason(waiting.result(SOON)) == "abort"
        gate.open()
        assert reply.result(WAIT) is None and status(engine)["residency"]["kv_cache"] == "released"
    engine.resume_memory_occupation()


@pytest.mark.parametrize("mode", [None, "keep", "retract", "wait"])
def test_while_an_updates_iterator_is_stuck(
    make_engine: Any, models: Any, pool: Any, mode: str | None
) -> None:
    """G2, C6: from an update's first write to its end no step is taken; other calls are served: status and
    aborts within a second, pause, resume and flush; what the update excludes is refused; a blocking
    generate of another thread waits for its end."""
    engine, prompt = owner(make_engine, models["W0"]), Tiny.prompt(6)
    with StepGate(engine) as gate:
        doomed, live = (
            ask(engine, prompt, {"rid": "d"}, max_new_tokens=99),
            ask(engine, prompt, max_new_tokens=9),
        )
        gate.step(3)
        gate.wait()
        pausing = None if mode in (None, "wait") else begin(engine, pool, engine.pause, mode)
        gate.step()
        assert pausing is None or pausing.result(WAIT)
        stuck = StuckUpdate(engine, models["W1"], pool)
        gate.serve(stuck.standing.is_set)
        gate.open()
        if mode == "wait":
            pausing = begin(engine, pool, engine.pause, "wait")
        state = pool.submit(status, engine).result(SOON)
        assert state["updating"] and state["weight_version"] == "W0"
        engine.abort("d")
        assert reason(take(engine, doomed)) == "abort"
        for call in (
            lambda: push(engine, models["W0"], "other"),
            engine.release_memory_occupation,
            engine.resume_memory_occupation,
            engine.weights_changed,
            lambda: engine.share_weights(models["W0"]),
            lambda: engine.get_weights_by_name("model.norm.weight"),
            engine.weights_checksum,
            lambda: list(engine.named_parameters()),
        ):
            with pytest.raises(EngineStateError):
                call()
        if mode != "wait":
            for other in ("keep", mode or "retract"):
                assert engine.pause(other)
        tokens = live._requests[0].output_len
        settled(engine)
        assert live._requests[0].output_len == tokens
        if mode != "wait":
            engine.resume()
            waiting = begin(engine, pool, lambda: engine.generate(input_ids=prompt, return_logprob=True))
            assert not waiting.done()
        stuck.go_on.set()
        assert stuck.reply.result(WAIT)[0] is True
        result = take(engine, live)
        if mode == "wait":
            assert pausing is not None and pausing.result(WAIT) is True
            assert engine.resume()
        else:
            assert labels(waiting.result(WAIT))[0][0] == "W1"
            assert span_gap(models, prompt, waiting.result(WAIT)) < EXACT
    assert len(result["output_ids"]) == 9 and span_gap(models, prompt, result) < EXACT
    assert [label for label, *_ in labels(result)] == ["W0", "W1"]
    Tiny.all_back(engine)


def test_result_then_update_at_once(make_engine: Any, models: Any) -> None:
    """C5: 200 times a result, then an update at once: always fine; the next result is of those weights."""
    engine, prompt = owner(make_engine, models["W0"]), Tiny.prompt(5)
    with Tiny.held(engine):
        background = ask(engine, Tiny.prompt(3), max_new_tokens=250)
    for turn in range(200):
        label = f"W{turn % 2}"
        assert push(engine, models[label], label)[0] is True
        result = engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 2}, return_logprob=True)
        assert labels(result) == [(label, 0, 2)]
        if turn % 50 == 0:
            assert span_gap(models, prompt, result) < EXACT
    engine.abort()
    assert span_gap(models, Tiny.prompt(3), take(engine, background)) < EXACT
    Tiny.all_back(engine)


def test_eight_threads_submit_while_the_engine_sleeps_and_wakes(
    make_engine: Any, counting: Any, pool: Any
) -> None:
    """B5: no forward while anything is released, whichever tags, and every request resolves, each with its
    whole output or the refusal of a call that doesn't wait."""
    engine = make_engine(counting, page_size=4)
    engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 1})
    runner: Any = engine.client._core.loop.runner
    run, asleep, stop = runner.run, [], threading.Event()

    def check(plan: Any) -> Any:
        asleep.append(engine.is_sleeping())
        return run(plan)

    def submit(number: int) -> list[Any]:
        outputs = []
        while not stop.is_set() or len(outputs) < 3:
            wait = number % 2 == 0
            try:
                result = engine.generate(
                    input_ids=[number], sampling_params={"max_new_tokens": 4, **GREEDY}, wait=wait
                )
                outputs.append(result["output_ids"])
            except EngineStateError:
                stop.wait(0.001)  # leaves the processor to others
        return outputs

    runner.run = check
    submitters = [pool.submit(submit, number) for number in range(8)]
    for turn in range(12):
        tags = [None, "kv_cache", ["weights", "cuda_graph"]][turn % 3]
        if turn % 4 == 3:
            engine.pause("keep")
        engine.release_memory_occupation(tags)
        settled(engine)
        assert engine.is_sleeping()
        engine.resume_memory_occupation(tags)
        engine.resume()
    stop.set()
    for number, submitter in enumerate(submitters):
        outputs = submitter.result(WAIT)
        assert outputs == [[number + i for i in range(1, 5)]] * len(outputs)
    assert len(asleep) > 8 and set(asleep) == {False}
    Tiny.all_back(engine)
