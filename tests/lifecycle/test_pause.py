"""What each mode of a pause promises: to requests in flight, queued and new, and to a pause on a pause."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.lifecycle.rollouts import (
    EXACT,
    WAIT,
    Forwards,
    ask,
    begin,
    reason,
    settled,
    take,
)
from tests.step_gate import StepGate
from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.errors import EngineStateError, RequestError

MODES = ["abort", "wait", "keep", "retract"]
GREEDY: dict[str, Any] = {"temperature": 0}


def admission(engine: Engine) -> str:
    """The axis of admission, as the engine reports it."""
    mode: str = Tiny.state(engine)["admission"]
    assert engine.is_paused() == (mode != "running")
    return mode


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("when", ["never used", "idle", "just finished", "finished in prefill"])
def test_nothing_is_there(make_engine: Any, counting: Any, mode: str, when: str) -> None:
    """C1: a pause of an engine with nothing to do answers True at once; blocking calls are refused until the
    resume, others wait; the second resume is as fine as the first."""
    engine = make_engine(counting)
    if when != "never used":
        tokens = 1 if when == "finished in prefill" else 4
        assert len(take(engine, ask(engine, [5], max_new_tokens=tokens))["output_ids"]) == tokens
    if when == "idle":
        settled(engine)
    assert engine.pause(mode) is True and admission(engine) == mode
    assert engine.pause(mode) is True and admission(engine) == mode
    with pytest.raises(EngineStateError, match=rf"paused \({mode}\).*resume\(\).*wait=True"):
        engine.generate(input_ids=[1])
    waiting = ask(engine, [7], **GREEDY)
    load = engine.get_load()[0]
    assert (load.num_reqs, load.num_waiting_reqs) == (1, 1)
    assert engine.resume() is True and admission(engine) == "running"
    assert engine.resume() is True
    assert take(engine, waiting)["output_ids"] == [8, 9, 10, 11, 12, 13]
    Tiny.all_back(engine)


@pytest.mark.parametrize("before", [None, *MODES])
@pytest.mark.parametrize("mode", ["Abort", "", None, 3, ["wait"]], ids=str)
def test_unknown_mode(counter: Engine, mode: Any, before: str | None) -> None:
    """An unknown mode changes nothing, on a running and on a paused engine; the blocking call raises, the
    client answers False and keeps the reason."""
    if before is not None:
        counter.pause(before)
    live = ask(counter, [1]) if before is not None else None
    with pytest.raises(RequestError, match="mode must be one of abort, wait, keep, retract"):
        counter.pause(mode)
    assert asyncio.run(counter.client.pause_scheduler(mode=mode)) is False
    assert "mode must be one of" in Tiny.state(counter)["last_refusal"]
    assert admission(counter) == (before or "running")
    counter.resume()
    if live is not None:
        assert reason(take(counter, live)) == "length"


@pytest.mark.parametrize("mode", MODES)
def test_in_flight_queued_and_new(make_engine: Any, counting: Any, pool: Any, mode: str) -> None:
    """C1, C6: the table of modes. One request runs, one is queued, two come while the engine is paused: what
    becomes of each before and after the resume, in order of arrival, with the KV kept or dropped."""
    engine = make_engine(counting, max_running_requests=1, page_size=4)
    order: list[int] = []
    with StepGate(engine) as gate:
        old = [ask(engine, [20 * number], **GREEDY) for number in (1, 2)]
        gate.step(2)
        gate.wait()
        pausing = begin(engine, pool, engine.pause, mode)
        gate.step()
        if mode == "wait":
            gate.wait()
            assert not pausing.done() and admission(engine) == mode
        else:
            assert pausing.result(WAIT) is True
        new = [ask(engine, [20 * number], **GREEDY) for number in (3, 4)]
        gate.open()
        assert pausing.result(WAIT) is True
        settled(engine)
        state, requests = Tiny.state(engine), [r for stream in (*old, *new) for r in stream._requests]
        tokens = {"abort": [3, 0, 0, 0], "wait": [6, 6, 0, 0]}.get(mode, [3, 0, 0, 0])
        assert [request.output_len for request in requests] == tokens
        assert state["num_running"] == (mode == "keep")
        held = state["pages"]["total"] - state["pages"]["free"] - state["pages"]["idle"]
        assert (held > 0) == (mode == "keep")
        if mode in ("abort", "wait"):
            assert [reason(take(engine, stream)) for stream in old] == [
                "abort" if mode == "abort" else "length"
            ] * 2
        forwards = Forwards(engine)
        for number, stream in enumerate(new if mode in ("abort", "wait") else [*old, *new]):
            publish = stream._requests[0].publish
            stream._requests[0].publish = lambda r, number=number, publish=publish: (
                order.append(number) if r.finished else None,
                publish(r),
            )[1]
        engine.resume()
        results = take(engine, *(new if mode in ("abort", "wait") else [*old, *new]))
    starts = [60, 80] if mode in ("abort", "wait") else [20, 40, 60, 80]
    assert [r["output_ids"] for r in results] == [[s + i for i in range(1, 7)] for s in starts]
    assert order == sorted(order) and len(order) == len(results)
    if mode in ("keep", "retract"):  # three tokens of six were there: 3 rows more, or 4 in one and 2 more
        assert forwards.tokens == 3 * 6 + (3 if mode == "keep" else 4 + 2)
    Tiny.all_back(engine)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [1, 3])
def test_last_token_is_computed(counter: Engine, mode: str, tokens: int) -> None:
    """C1, C7: a pause that comes while a request's last token is computed, also its first one, finds it
    finished as what it is, never aborted."""
    paused = Tiny.after_step(counter, tokens, lambda: counter.pause(mode))
    try:
        with Tiny.held(counter):
            by_length = ask(counter, [5], max_new_tokens=tokens, **GREEDY)
            by_token = ask(counter, [50], max_new_tokens=99, stop_token_ids=[50 + tokens], **GREEDY)
        assert paused.result(WAIT) is True
        ends = [result["meta_info"]["finish_reason"] for result in take(counter, by_length, by_token)]
        assert ends == [{"type": "length", "length": tokens}, {"type": "stop", "matched": 50 + tokens}]
    finally:
        del counter.client._core.loop.runner.run, counter.client._core.loop._post
        counter.resume()
    Tiny.all_back(counter)


@pytest.mark.parametrize("mode", ["keep", "retract"])
def test_nothing_leaks_out_while_paused(counter: Engine, pool: Any, mode: str) -> None:
    """C8: a stream's tokens stop at the pause and go on after it; whatever calls the loop serves meanwhile,
    no forward runs."""
    with StepGate(counter) as gate:
        stream = counter.generate(
            input_ids=[100], sampling_params={"max_new_tokens": 8, **GREEDY}, stream=True
        )
        gate.step(2)
        gate.wait()
        pausing = begin(counter, pool, counter.pause, mode)
        gate.step()
        assert pausing.result(WAIT)
        gate.open()
        forwards = Forwards(counter)
        got = next(stream)["output_ids"]
        later = pool.submit(lambda: [token for message in stream for token in message["output_ids"]])
        for _ in range(20):
            settled(counter)
            counter.get_load()
            counter.abort("somebody else's")
        assert (got, forwards.count, later.done()) == ([101, 102, 103], 0, False)
        counter.resume()
        assert later.result(WAIT) == [104, 105, 106, 107, 108]


@pytest.mark.parametrize("first", ["keep", "retract"])
@pytest.mark.parametrize("second", MODES)
def test_pausing_while_paused(make_engine: Any, counting: Any, pool: Any, first: str, second: str) -> None:
    """A pause on a pause acts on everything that is left, what came in between included: `abort` ends it,
    `wait` runs it out, `retract` drops KV, `keep` changes nothing. The new mode is the mode then."""
    engine = make_engine(counting, page_size=4)
    with StepGate(engine) as gate:
        running = ask(engine, [10], **GREEDY)
        gate.step(2)
        gate.wait()
        pausing = begin(engine, pool, engine.pause, first)
        gate.step()
        assert pausing.result(WAIT)
        gate.open()
    new = ask(engine, [30], **GREEDY)
    assert engine.pause(second) is True and admission(engine) == second
    settled(engine)
    state = Tiny.state(engine)
    assert state["num_running"] == (first == second == "keep")
    done = {"abort": (3, 0), "wait": (6, 6)}.get(second)
    if done is not None:
        results = take(engine, running, new)
        assert tuple(len(r["output_ids"]) for r in results) == done
        assert {reason(r) for r in results} == {"abort" if second == "abort" else "length"}
        assert engine.get_load()[0].num_reqs == 0
        engine.resume()
    else:
        assert (state["num_waiting"], engine.get_load()[0].num_reqs) == (2 - state["num_running"], 2)
        engine.resume()
        results = take(engine, running, new)
        assert [r["output_ids"] for r in results] == [list(range(11, 17)), list(range(31, 37))]
    Tiny.all_back(engine)


def test_threads_submit_while_an_abort_pauses(make_engine: Any, counting: Any, pool: Any) -> None:
    """C4: requests that eight threads submit around a pause all resolve, aborted or waiting for the resume;
    none runs while paused."""
    engine = make_engine(counting)
    engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 1})
    runner: Any = engine.client._core.loop.runner
    run, ran_paused, barrier = runner.run, [], threading.Barrier(9)

    def check(plan: Any) -> Any:
        ran_paused.append(engine.client._core.life.admission.mode)
        return run(plan)

    def submit(number: int) -> list[str]:
        barrier.wait(WAIT)
        streams = [ask(engine, [number, k], max_new_tokens=3) for k in range(12)]
        return [reason(result) for result in take(engine, *streams)]

    runner.run = check
    submitters = [pool.submit(submit, number) for number in range(8)]
    barrier.wait(WAIT)
    for _ in range(6):
        assert engine.pause("abort")
        settled(engine)
        assert engine.is_paused() and Tiny.state(engine)["num_running"] == 0
        engine.resume()
    reasons = [one for submitter in submitters for one in submitter.result(WAIT)]
    assert len(reasons) == 96 and set(reasons) <= {"abort", "length"}
    assert set(ran_paused) <= {None}
    Tiny.all_back(engine)


@pytest.mark.parametrize("state", ["queued", "prefilling", "forked", "decoding", "kept", "retracted", "new"])
@pytest.mark.parametrize("how", ["abort", "pause"])
def test_a_group_is_ended_whole(make_engine: Any, counting: Any, pool: Any, state: str, how: str) -> None:
    """C9, C2: a request with n = 8 that is aborted, or meets a pause that aborts, in any state gives eight
    results, with the tokens it had, and leaves no child and no page."""
    engine = make_engine(counting, page_size=4, chunked_prefill_size=8, max_running_requests=16)
    steps = {"queued": 0, "prefilling": 1, "new": 0}.get(state, 3)
    with StepGate(engine) as gate:
        blocker = ask(engine, [1], max_new_tokens=200, **GREEDY)
        gate.wait()
        if state == "new":
            assert begin(engine, pool, engine.pause, "retract")
        group = ask(engine, list(range(100, 120)), {"rid": "n8"}, n=8, max_new_tokens=40, **GREEDY)
        gate.step(1 + steps + 2 * (state in ("decoding", "kept", "retracted")) if state != "new" else 1)
        if state != "new":
            gate.wait()
        if state in ("kept", "retracted"):
            pausing = begin(engine, pool, engine.pause, "keep" if state == "kept" else "retract")
            gate.step()
            pausing.result(WAIT)
        if how == "abort":
            engine.abort("n8")
            gate.open()
        else:
            pausing = begin(engine, pool, engine.pause, "abort")
            gate.open()
            assert pausing.result(WAIT)
        results = take(engine, group)
        engine.abort()
        assert reason(take(engine, blocker)) == "abort"
        engine.resume()
    assert [r["meta_info"]["index"] for r in results] == list(range(8))
    assert {reason(r) for r in results} == {"abort"}
    counts = {len(r["output_ids"]) for r in results}
    assert len(counts) == 1 and (counts == {0}) == (state in ("queued", "prefilling", "new"))
    for result in results:
        assert result["output_ids"] == [(120 + i) % 256 for i in range(len(result["output_ids"]))]
        assert len(result["meta_info"]["output_token_logprobs"]) == len(result["output_ids"])
    Tiny.all_back(engine)


def test_paused_restores_what_was(counter: Engine) -> None:
    """B6: `paused` puts back the mode of entry, also out of an exception, without acting on a request."""
    with pytest.raises(ZeroDivisionError), counter.paused("keep"):
        live = ask(counter, [3], **GREEDY)
        assert admission(counter) == "keep"
        with counter.paused("retract"):
            assert admission(counter) == "retract"
        assert admission(counter) == "keep"
        raise ZeroDivisionError
    assert admission(counter) == "running"
    assert take(counter, live)["output_ids"] == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("mode", ["wait", "keep", "retract"])
@pytest.mark.parametrize("seed", [None, 7])
def test_draws_are_those_without_a_pause(
    make_engine: Any, model: Any, pool: Any, mode: str, seed: int | None
) -> None:
    """Draws at temperature 1 don't depend on pauses, with a seed of the request's or of the engine's: pausing
    after every step gives the same tokens, with the same logprobs."""
    prompt = Tiny.prompt(9)
    plain, paused = (make_engine(model, page_size=4, seed=3) for _ in range(2))
    expected = take(plain, ask(plain, prompt, n=3, seed=seed, max_new_tokens=7))
    with StepGate(paused) as gate:
        group = ask(paused, prompt, n=3, seed=seed, max_new_tokens=7)
        for _ in range(3 if mode == "wait" else 6):
            gate.wait()
            pausing = begin(paused, pool, paused.pause, mode)
            gate.step()
            if mode == "wait":
                gate.wait()
            resuming = begin(paused, pool, paused.resume)
            gate.step(mode == "wait")
            assert resuming.result(WAIT) is True
            assert pausing.result(WAIT) is (mode != "wait")
    results = take(paused, group)
    assert [r["output_ids"] for r in results] == [r["output_ids"] for r in expected]
    for result in results:
        assert Tiny.gap(model, prompt, result) < EXACT
    Tiny.all_back(paused)
