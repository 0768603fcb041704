"""How a turn ends, and who gets the session next: nothing of a lost turn is kept, and nothing is stuck."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.lifecycle.conversation import Conversation
from tests.lifecycle.rollouts import WAIT, StuckUpdate, ask, owner, pause_at, reason, settled, take
from tests.step_gate import StepGate
from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.errors import EngineShutdownError, EngineStateError, EngineTimeoutError, RequestError
from tokenspeed_rl.requests import GenerateReqInput

Lose = Callable[[Conversation, Any, StepGate], Any]
STREAM = {"stream": True}


@pytest.fixture
def talk(counter: Engine, counting: Any) -> Iterator[Conversation]:
    """One turn old: 1, 2, and what follows."""
    made = Conversation(counter, counting)
    made.turn([1, 2], temperature=0)
    yield made
    counter.close_session(made.id)
    assert Tiny.state(counter)["sessions"]["count"] == 0
    Tiny.all_back(counter)


def abort(talk: Conversation, stream: Any, _: StepGate) -> None:
    talk.engine.abort(stream._requests[0].rid)
    assert reason(take(talk.engine, stream)) == "abort"


def abort_everything(talk: Conversation, stream: Any, _: StepGate) -> None:
    talk.engine.abort()
    assert reason(take(talk.engine, stream)) == "abort"


def cancel(_: Conversation, stream: Any, __: StepGate) -> None:
    async def go() -> None:
        task = asyncio.create_task(stream.result())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())


def time_out(_: Conversation, stream: Any, __: StepGate) -> None:
    with pytest.raises(EngineTimeoutError):
        asyncio.run(stream.result(0.01))


def close(_: Conversation, stream: Any, __: StepGate) -> None:
    asyncio.run(stream.aclose())


def close_the_event_loop(talk: Conversation, stream: Any, gate: StepGate) -> None:
    loop = asyncio.new_event_loop()
    task = loop.create_task(anext(stream))
    loop.run_until_complete(asyncio.sleep(0))
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    gate.step()
    settled(talk.engine)


ENDS: list[Lose] = [abort, abort_everything, cancel, time_out, close, close_the_event_loop]


@pytest.mark.parametrize("lose", ENDS, ids=lambda lose: lose.__name__)
def test_a_lost_turn(talk: Conversation, step_gate: type[StepGate], lose: Lose) -> None:
    """Contract 7: a turn that is aborted, cancelled, timed out or left leaves the session as before, and the
    next one begins at once: also while a step of the lost one still runs."""
    with step_gate(talk.engine) as gate:
        stream = talk.ask([30], max_new_tokens=50)
        gate.step(3)
        gate.wait()
        lose(talk, stream, gate)
        following = talk.ask([40], temperature=0)
        gate.open()
        talk.heard([40], take(talk.engine, following))


def test_a_pause_that_aborts(talk: Conversation, step_gate: type[StepGate], pool: Any) -> None:
    """Contract 5, 7: the turn ends as `abort`, and is lost; the next one waits for the resume."""
    with step_gate(talk.engine) as gate:
        stream = talk.ask([30], max_new_tokens=50)
        pause_at(talk.engine, gate, pool, "abort", steps=3)
        assert reason(take(talk.engine, stream)) == "abort"
        following = talk.ask([40], temperature=0)
        gate.open()
        talk.engine.resume()
        talk.heard([40], take(talk.engine, following))


@pytest.mark.parametrize("read", [0, 1])
def test_a_dropped_stream(talk: Conversation, step_gate: type[StepGate], read: int) -> None:
    """Contract 7: a stream that is dropped, read or not, frees its session before the caller goes on."""
    with step_gate(talk.engine) as gate:
        stream = talk.ask([30], STREAM, max_new_tokens=50)
        gate.step(3)
        gate.wait()
        for _ in range(read):
            talk.engine.llm.run(anext(stream))
        del stream
        gc.collect()
        following = talk.ask([40], temperature=0)
        gate.open()
        talk.heard([40], take(talk.engine, following))


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_that_nobody_took(talk: Conversation, streams: bool) -> None:
    """Contract 7: a turn that had ended when its caller gave up, by a timeout or by closing the stream, was
    lost all the same: which of the two came first doesn't matter to the session. A turn that has begun since
    keeps it."""
    for follow in (False, True):
        before = list(talk.tokens)
        stream = talk.ask([30], {"stream": streams}, temperature=0)
        settled(talk.engine)
        while Tiny.state(talk.engine)["sessions"]["live"]:
            settled(talk.engine)
        talk.tokens = [*before, 30, *range(31, 37)]
        assert Tiny.state(talk.engine)["sessions"]["tokens"] == len(talk.tokens)
        if follow:
            talk.turn([40], temperature=0)
        asyncio.run(stream.aclose())
        if not follow:
            talk.tokens = before
        assert Tiny.state(talk.engine)["sessions"]["tokens"] == len(talk.tokens)
    talk.turn([50], temperature=0)


def test_an_answer_that_cannot_be_told(talk: Conversation, monkeypatch: Any) -> None:
    """Contract 7: where the caller's tokenizer fails on the output, its call raises and the turn is lost."""

    def fail(*_: Any, **__: Any) -> str:
        raise ZeroDivisionError

    stream = talk.ask([30])
    with monkeypatch.context() as patched:
        patched.setattr(type(talk.engine.client.tokenizer), "decode", fail)
        with pytest.raises(ZeroDivisionError):
            take(talk.engine, stream)
    talk.turn([40], temperature=0)


def test_a_refused_submission_gives_the_session_back(
    talk: Conversation, step_gate: type[StepGate], monkeypatch: Any
) -> None:
    """Contract 3, 7: a turn whose rid is live, or whose caller may not wait, reserves nothing."""
    engine = talk.engine
    with step_gate(engine) as gate:
        other = ask(engine, [99], {"rid": "other"})
        with pytest.raises(RequestError, match="live request"):
            talk.ask([30], {"rid": "other"})
        gate.open()
        take(engine, other)
    with engine.paused("keep"), pytest.raises(EngineStateError, match="paused"):
        engine.generate(input_ids=[30], session_params={"id": talk.id})
    assert Tiny.state(engine)["sessions"]["live"] == 0
    talk.turn([40], temperature=0)


def test_a_second_turn(talk: Conversation, step_gate: type[StepGate], pool: Any) -> None:
    """Contract 7: of two threads that want the session at once one gets it; the other is told which request
    has it, and loses nothing of it. The same call is right afterwards."""
    turn: dict[str, Any] = {"session_params": {"id": talk.id}}
    params = {"temperature": 0, "max_new_tokens": 6}
    with step_gate(talk.engine) as gate:
        fields = {"sampling_params": params, "return_logprob": True, **turn}
        calls = {
            token: pool.submit(talk.engine.generate, input_ids=[token], rid=f"r{token}", **fields)
            for token in (30, 60)
        }
        gate.wait()
        [loser] = _first_done(calls)
        winner = 90 - loser
        with pytest.raises(EngineStateError, match=f"'r{winner}'"):
            calls[loser].result(WAIT)
        gate.open()
        talk.heard([winner], calls[winner].result(WAIT))
    talk.turn([loser], temperature=0)


def _first_done(calls: dict[int, Any]) -> list[int]:
    ended = threading.Event()
    for call in calls.values():
        call.add_done_callback(lambda _: ended.set())
    assert ended.wait(WAIT)
    return [token for token, call in calls.items() if call.done()]


def test_a_turn_that_is_overtaken(talk: Conversation, monkeypatch: Any) -> None:
    """Contract 7: a turn that was prepared while another one came and went is refused, and not put behind
    tokens that it doesn't know."""
    intake = type(talk.engine.client._core.intake)
    prepare = intake.prepare

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        requests = prepare(self, *args, **kwargs)
        monkeypatch.setattr(intake, "prepare", prepare)
        talk.turn([30], temperature=0)
        return requests

    monkeypatch.setattr(intake, "prepare", slow)
    with pytest.raises(EngineStateError, match="another turn"):
        talk.ask([40])
    talk.turn([40], temperature=0)


@pytest.mark.parametrize("streams", [False, True])
def test_the_next_turn_from_the_last_ones_reader(talk: Conversation, pool: Any, streams: bool) -> None:
    """Contract 7: whoever is told that a turn ended finds the session free and grown, on whichever thread; a
    stream's deltas are the turn's own ids."""
    for number in range(20):
        obj = GenerateReqInput(
            input_ids=[number],
            sampling_params={"max_new_tokens": 3, "temperature": 0},
            session_params={"id": talk.id},
            return_logprob=True,
            stream=streams,
        )
        messages = pool.submit(lambda obj: list(talk.engine.llm.generate_stream(obj)), obj).result(WAIT)
        assert [m["meta_info"]["finish_reason"] is not None for m in messages][-1]
        ids = [token for message in messages for token in message["output_ids"]]
        assert ids == [number + 1, number + 2, number + 3]
        assert {m["meta_info"]["prompt_tokens"] for m in messages} == {len(talk.tokens) + 1}
        talk.tokens += [number, *ids]
    assert talk.turn([90], temperature=0)["output_ids"] == [91, 92, 93, 94, 95, 96]


STATES: dict[str, Callable[[Engine], Any]] = {
    "running": lambda e: None,
    "keep": lambda e: e.pause("keep"),
    "retract": lambda e: e.pause("retract"),
    "asleep": lambda e: [e.pause("retract"), e.release_memory_occupation()],
}


@pytest.mark.parametrize("name", STATES)
def test_closing_aborts_the_live_turn(
    make_engine: Any, models: Any, pool: Any, step_gate: type[StepGate], name: str
) -> None:
    """Contract 7: in every state, at once, also while a step is held; whoever waits is woken with what the
    turn had. The id can be opened again, and is empty; the old turn's end doesn't bring anything back."""
    engine = owner(make_engine, models["W0"])
    talk = Conversation(engine, models["W0"])
    talk.turn([1, 2, 3])
    with step_gate(engine) as gate:
        stream = talk.ask([4], max_new_tokens=50)
        gate.step(2)
        gate.wait()
        if name != "running":
            moving = pool.submit(STATES[name], engine)
            gate.open()
            moving.result(WAIT)
        engine.close_session(talk.id)
        result = take(engine, stream)
        assert result["meta_info"]["finish_reason"] == {"type": "abort", "message": "its session was closed"}
        assert result["meta_info"]["completion_tokens"] >= 1
        with pytest.raises(RequestError, match="no session"):
            talk.ask([5])
        assert engine.open_session(50, talk.id) == talk.id
        gate.open()
    if name == "asleep":
        engine.resume_memory_occupation()
        engine.update_weights_from_tensor(dict(models["W0"].named_parameters()))
    engine.resume()
    assert Tiny.state(engine)["sessions"] == {"count": 1, "tokens": 0, "live": 0}
    talk.tokens = []
    talk.turn([5])
    Tiny.all_back(engine)


def test_closing_during_an_update(make_engine: Any, models: Any, pool: Any) -> None:
    """Contract 7: also while an update is half written, and with a turn that has not begun to run."""
    engine = owner(make_engine, models["W0"])
    talk = Conversation(engine, models["W0"])
    talk.turn([1])
    update = StuckUpdate(engine, models["W1"], pool)
    assert update.standing.wait(WAIT)
    stream, other = talk.ask([2]), Conversation(engine, models["W1"])
    engine.close_session(talk.id)
    assert take(engine, stream)["output_ids"] == []
    update.go_on.set()
    update.reply.result(WAIT)
    other.turn([3])
    Tiny.all_back(engine)


def test_a_turn_whose_session_is_closed_before_it_begins(talk: Conversation, monkeypatch: Any) -> None:
    """Contract 7: it is refused, also when the id is that of another session by then."""
    intake = type(talk.engine.client._core.intake)
    prepare = intake.prepare

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        requests = prepare(self, *args, **kwargs)
        talk.engine.close_session(talk.id)
        talk.engine.open_session(50, talk.id)
        return requests

    monkeypatch.setattr(intake, "prepare", slow)
    with pytest.raises(RequestError, match="no session"):
        talk.ask([40])
    assert talk.engine.get_load()[0].num_reqs == 0


def test_shutdown_during_a_turn(make_engine: Any, counting: Any, step_gate: type[StepGate]) -> None:
    """G8: the waiter of a turn gets EngineShutdownError, as of any request; sessions are gone."""
    engine = make_engine(counting)
    talk = Conversation(engine, counting)
    with step_gate(engine) as gate:
        stream = talk.ask([1], max_new_tokens=50)
        gate.step()
        gate.wait()
        ending = threading.Thread(target=engine.shutdown, daemon=True)
        ending.start()
        with pytest.raises(EngineShutdownError):
            asyncio.run(stream.result(WAIT))
        gate.open()
    ending.join(WAIT)
    for call in (lambda: engine.open_session(5), lambda: engine.close_session(talk.id)):
        with pytest.raises(EngineShutdownError):
            call()
