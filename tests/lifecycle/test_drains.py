"""A pause that waits, and the release of a running engine: states in which everything else is served."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.lifecycle.draining import GREEDY, NAMES, Draining, at_rest, drains, release, revive, wait
from tests.lifecycle.rollouts import (
    EXACT,
    WAIT,
    StuckUpdate,
    ask,
    begin,
    begin_update,
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
    EngineDeadError,
    EngineShutdownError,
    EngineStateError,
    WeightsInvalidError,
    WeightUpdateError,
)


@drains
def test_other_calls_are_served(one: Engine, pool: Any, drain: Any) -> None:
    """G2: while a drain is pending everything else is answered, from any thread; a second pause or release is
    refused with the reason; new requests wait outside, the old ones run to their end in order; then the drain
    is answered."""
    with StepGate(one) as gate:
        drained = Draining(one, gate, pool, drain)
        assert Tiny.state(one)["draining"] == NAMES[drain]
        assert one.is_paused() == (drain is wait) and not one.is_sleeping()
        assert one.get_load()[0].num_reqs == 2 and one.memory_report()["kv_cache"]["mapped"] > 0
        match = "a pause that waits is waiting" if drain is wait else "a release of .* is waiting"
        for call, args in (
            (one.pause, ["abort"]),
            (one.pause, ["wait"]),
            (one.release_memory_occupation, []),
        ):
            with pytest.raises(EngineStateError, match=match):
                drained.served(call, *args)
            gate.wait()
        assert drained.served(lambda: asyncio.run(one.client.pause_scheduler(mode="keep"))) is False
        gate.wait()
        assert (
            "is refused" in Tiny.state(one)["last_refusal"]
            and NAMES[drain] in Tiny.state(one)["last_refusal"]
        )
        assert drained.served(one.flush_cache).success
        gate.wait()
        assert len(drained.served(one.weights_checksum)) > 8
        with pytest.raises(
            EngineStateError, match=r"paused \(wait\)" if drain is wait else "generate is refused"
        ):
            one.generate(input_ids=[1])
        held = ask(one, [90], **GREEDY)
        assert not drained.reply.done()
        gate.open()
        assert drained.reply.result(WAIT) is (True if drain is wait else None)
        settled(one)
        assert [r["output_ids"] for r in take(one, *drained.old)] == [
            list(range(21, 27)),
            list(range(41, 47)),
        ]
        assert held._requests[0].output_len == 0 and one.get_load()[0].num_waiting_reqs == 1
        assert Tiny.state(one)["draining"] is None and one.is_sleeping() == (drain is release)
        revive(one)
        assert take(one, held)["output_ids"] == list(range(91, 97))
    Tiny.all_back(one)


@drains
def test_a_resume_withdraws(one: Engine, pool: Any, drain: Any) -> None:
    """A resume withdraws a pending drain: the pause answers False and says why, the release raises; what ran
    goes on, what was held comes behind it in order of arrival."""
    order: list[int] = []
    with StepGate(one) as gate:
        drained = Draining(one, gate, pool, drain)
        held = [ask(one, [20 * number], **GREEDY) for number in (3, 4)]
        for number, stream in enumerate((*drained.old, *held)):
            request = stream._requests[0]
            publish = request.publish
            request.publish = lambda r, n=number, publish=publish: (order.append(n), publish(r))[1]
        assert drained.served(one.resume) is True
        if drain is wait:
            assert drained.reply.result(WAIT) is False
        else:
            with pytest.raises(EngineStateError, match="withdrawn by a resume"):
                drained.reply.result(WAIT)
        assert at_rest(one)
    results = take(one, *drained.old, *held)
    assert [r["output_ids"][-1] for r in results] == [26, 46, 66, 86]
    assert order == sorted(order)
    Tiny.all_back(one)


def test_a_withdrawn_pause_tells_the_client_why(one: Engine, pool: Any) -> None:
    """`pause_scheduler` answers False to a pause that a resume withdrew, and keeps the reason."""
    with StepGate(one) as gate:
        drained = Draining(one, gate, pool, lambda e: asyncio.run(e.client.pause_scheduler(mode="wait")))
        assert drained.served(one.resume) is True
        assert drained.reply.result(WAIT) is False
    assert "withdrawn by a resume" in Tiny.state(one)["last_refusal"]
    assert [reason(r) for r in take(one, *drained.old)] == ["length"] * 2


def failing(model: Any) -> Any:
    """Pairs of an update that fails half-way."""
    yield from list(model.named_parameters())[:3]
    raise ZeroDivisionError


@drains
def test_an_update_acts_as_on_a_running_engine(make_engine: Any, pool: Any, drain: Any) -> None:
    """C6: an update during a drain is served: requests in flight re-prefill under the new weights and run to
    their end, and the drain ends after them. One that fails half-way leaves nothing that could run, which
    ends the drain too."""
    models = {"W0": Tiny.model(), "W1": Tiny.model(seed=1)}
    prompt = Tiny.prompt(9)
    for fails in (False, True):
        engine = owner(make_engine, models["W0"])
        with StepGate(engine) as gate:
            old = ask(engine, prompt)
            gate.step(2)
            gate.wait()
            reply = begin(engine, pool, drain, engine)
            gate.step()
            gate.wait()
            pairs = failing(models["W1"]) if fails else dict(models["W1"].named_parameters())
            update = begin_update(
                engine,
                pool,
                gate,
                lambda e=engine, p=pairs: e.update_weights_from_tensor(p, weight_version="W1"),
            )
            gate.open()
            if fails:
                with pytest.raises(WeightUpdateError, match="invalid until a complete update"):
                    update.result(WAIT)
            else:
                assert update.result(WAIT)[0] is True
            assert reply.result(WAIT) is (True if drain is wait else None)
        if fails:
            requests = old._requests[0]
            assert requests.output_len == 5 and not requests.finished
            engine.resume()
            if drain is release:
                engine.resume_memory_occupation()
            with pytest.raises(WeightsInvalidError):
                engine.generate(input_ids=prompt)
            push(engine, models["W1"], "W1")
        result = take(engine, old)
        assert len(result["output_ids"]) == 6 and span_gap(models, prompt, result) < EXACT
        assert labels(result) == [("W0", 0, 5), ("W1", 5, 6)]


def test_what_cannot_run_is_not_drained_for(make_engine: Any, pool: Any) -> None:
    """C10: after pause(retract), release and wake, a pause that waits answers at once while the weights are
    invalid or something sleeps: the queued requests stay, and run once they can."""
    models = {"W0": Tiny.model(), "W1": Tiny.model(seed=1)}
    engine, prompt = owner(make_engine, models["W0"]), Tiny.prompt(7)
    with StepGate(engine) as gate:
        old = ask(engine, prompt, max_new_tokens=9)
        gate.step(2)
        gate.wait()
        pausing = begin(engine, pool, engine.pause, "retract")
        gate.step()
        assert pausing.result(WAIT)
        gate.open()
    engine.release_memory_occupation()
    new = ask(engine, prompt[:4])
    for tags in ("weights", "kv_cache", "cuda_graph"):
        assert engine.pause("wait", timeout=WAIT) is True  # asleep
        engine.resume()
        engine.resume_memory_occupation(tags)
    assert Tiny.state(engine)["validity"].startswith("invalid")
    assert engine.pause("wait", timeout=WAIT) is True  # awake, but without weights
    assert engine.get_load()[0].num_waiting_reqs == 2
    push(engine, models["W1"], "W1")
    settled(engine)
    assert old._requests[0].output_len == 3
    assert engine.pause("wait", timeout=WAIT) is True  # they can now, so this runs them out
    results = take(engine, old, new)
    assert [labels(r) for r in results] == [[("W0", 0, 3), ("W1", 3, 9)], [("W1", 0, 6)]]
    assert max(span_gap(models, p, r) for p, r in zip((prompt, prompt[:4]), results, strict=True)) < EXACT
    engine.resume()
    Tiny.all_back(engine)


@drains
@pytest.mark.parametrize("how", ["shutdown", "failure"])
def test_the_engine_ends_meanwhile(one: Engine, pool: Any, drain: Any, how: str) -> None:
    """G3, G8: whoever waits for a drain is woken when the engine is shut down, or its loop fails, with the
    error and its cause; so are requests drained for and held."""
    error: type[Exception] = EngineShutdownError if how == "shutdown" else EngineDeadError
    with StepGate(one) as gate:
        drained = Draining(one, gate, pool, drain)
        held = ask(one, [60])
        if how == "shutdown":
            ending = pool.submit(one.shutdown)
        else:
            runner: Any = one.client._core.loop.runner
            runner.decoder.forward = lambda *_, **__: 1 / 0
        gate.open()
        with pytest.raises(error) as raised:
            drained.reply.result(WAIT)
        if how == "failure":
            assert isinstance(raised.value.__cause__, ZeroDivisionError)
            for stream in (*drained.old, held):
                with pytest.raises(error):
                    take(one, stream)
        else:
            ending.result(WAIT)
    assert one.is_paused() in (True, False) and one.is_sleeping() is False
    for call in (one.pause, one.resume, one.release_memory_occupation):
        with pytest.raises(error):
            call()


def test_what_an_update_is_about_to_let_run(make_engine: Any, pool: Any) -> None:
    """C10: requests that wait for valid weights are drained for while an update that brings them goes on."""
    model = Tiny.model()
    engine = owner(make_engine, model)
    engine.release_memory_occupation("weights")
    engine.resume_memory_occupation("weights")
    waiting = ask(engine, [1, 2, 3])
    stuck = StuckUpdate(engine, model, pool)
    assert stuck.standing.wait(WAIT)
    reply = begin(engine, pool, engine.pause, "wait")
    settled(engine)
    assert not reply.done() and Tiny.state(engine)["draining"] is not None
    stuck.go_on.set()
    assert reply.result(WAIT) is True and stuck.reply.result(WAIT)[0] is True
    assert waiting._requests[0].finished
    assert span_gap({"W1": model}, [1, 2, 3], take(engine, waiting)) < EXACT
