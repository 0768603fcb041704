"""Every call in every state does what the table says, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.lifecycle.driven import FAMILY, GROUP, WAIT, Driven
from tests.lifecycle.state_calls import act
from tests.lifecycle.state_table import CALLS, TABLES, expected
from tests.lifecycle.states import FALSE, OK, WAITS, Call, Condition, Row, State, states
from tests.lifecycle.states_page import page
from tests.tiny import Tiny
from tokenspeed_rl import AsyncLLM, Engine, EngineClient
from tokenspeed_rl.errors import EngineStateError, TokenSpeedError
from tokenspeed_rl.weights import WeightsSender

PAGE = Path(__file__).parents[2] / "docs" / "states.md"


@pytest.fixture(scope="module")
def driven(tmp_path_factory: Any) -> Iterator[Callable[[State], Driven]]:
    """The engine that can get into a state; one of each kind for the whole file."""
    path = str(tmp_path_factory.mktemp("model"))
    Tiny.model(FAMILY).save_pretrained(path)
    made: dict[tuple[bool, bool], Driven] = {}
    with ThreadPoolExecutor(32) as pool, WeightsSender("127.0.0.1", 0, 2, GROUP, "gloo", WAIT) as sender:

        def of(state: State) -> Driven:
            kept = state.valid and not state.shared and "weights" in state.asleep
            if (state.shared, kept) not in made:
                made[state.shared, kept] = Driven(pool, sender, path, shared=state.shared, backup=kept)
            return made[state.shared, kept]

        yield of
        for each in made.values():
            each.close()


@pytest.mark.parametrize("state", states(), ids=str)
def test_every_call(driven: Callable[[State], Driven], state: State) -> None:
    """B1: every call in this state is ok and leads to the state the table says, waits, or gets the typed
    error and has changed nothing; whatever it was, the engine generates afterwards, with transformers'
    logprobs."""
    engine = driven(state)
    problems = [problem for calls in sessions(state) for problem in visit(engine, state, calls)]
    engine.check()
    assert not problems, f"in the state {state}:\n" + "\n".join(problems)


def sessions(state: State) -> Iterator[list[Call]]:
    """All calls: first what changes nothing, then each that changes the state, then those that wait."""
    outcomes = {name: expected(state, call).kind for name, call in CALLS.items()}
    moving = [call for name, call in CALLS.items() if outcomes[name] == OK and call.then(state) != state]
    waiting = [call for name, call in CALLS.items() if outcomes[name] == WAITS]
    yield [call for call in CALLS.values() if call not in moving and call not in waiting]
    yield from ([call] for call in moving)
    yield waiting


def visit(driven: Driven, state: State, calls: list[Call]) -> list[str]:
    """Go to the state, make the calls, come home; what was wrong, in words."""
    problems: list[str] = []

    def probe_all() -> None:
        for call in calls:
            try:
                probe(driven, state, call)
            except BaseException as error:  # inside an iterator it would pass for the update's failure
                problems.append(f"{call}: {type(error).__name__}: {error}")
                return

    driven.go(state)
    try:
        if state.moment == "updating":
            with driven.updating():
                probe_all()
        elif state.moment == "inside":
            driven.inside(probe_all)
        elif state.moment == "ended":
            driven.engine.shutdown()
            probe_all()
        else:
            probe_all()
    finally:
        driven.home()
    return problems


def probe(driven: Driven, state: State, call: Call) -> None:
    """Make the call in the state; AssertionError where anything isn't as the table says."""
    kind, _ = expected(state, call)
    ended = state.moment == "ended"
    before = None if ended else driven.see(state.moment)
    assert ended or (before is not None and before[0] == state), f"the engine is not there, but {before}"
    if kind == WAITS:
        assert_waits(driven, call)
    else:
        found, value = outcome(driven, call)
        assert found == kind, f"gave {found} ({value}), not {kind}"
        if kind == OK and ("generate" in call.member or call.member == "encode"):
            driven.right(value)
    if ended or driven.loop.closing:
        assert ended or call.member == "shutdown"
        return
    driven.settle()
    seen, epoch = driven.see(state.moment)
    assert seen == (call.then(state) if kind == OK else state), f"{kind} led to: {seen}"
    assert kind == OK or (before is not None and epoch == before[1])


def outcome(driven: Driven, call: Call) -> tuple[str, Any]:
    """What came of a call, as the table names it, and its result or message."""
    driven.engine.client.refusal = ""
    try:
        value = act(driven, call)
    except TokenSpeedError as error:
        return type(error).__name__, error
    first = value[0] if isinstance(value, tuple | list) else value
    if not (call.answers and first is False):
        return OK, value
    assert driven.engine.client.refusal, "the reason was lost"
    if isinstance(value, tuple):
        assert isinstance(value.report, EngineStateError) and value[1] == str(value.report)
    return FALSE, value


def assert_waits(driven: Driven, call: Call) -> None:
    """The call's request is there, and nothing is computed for it."""
    steps = Tiny.state(driven.engine)["steps"]
    with driven.posted("submit") as come:
        driven.waiting.append(driven.pool.submit(act, driven, call))
        assert come.wait(WAIT), "it did not submit anything"
    driven.settle()
    assert Tiny.state(driven.engine)["steps"] == steps, "a step was taken"
    assert not driven.waiting[-1].done(), driven.waiting[-1].exception(0)


def test_nothing_is_left_out() -> None:
    """B1: the table has every member of the protocol, of `AsyncLLM` beyond it, and of `Engine`."""
    rows = {(call.on, call.member) for call in CALLS.values()}
    protocol = {name for name in vars(EngineClient) if not name.startswith("_")} | set(
        EngineClient.__annotations__
    )
    assert len(protocol) > 35
    assert {name for name in protocol if ("AsyncLLM", name) not in rows} == set()
    for member in ("destroy_weights_update_group", "shutdown"):
        assert hasattr(AsyncLLM, member) and ("AsyncLLM", member) in rows
    verbs = {name for name in dir(Engine) if not name.startswith("_")}
    assert len(verbs) > 35
    assert {name for name in verbs if ("Engine", name) not in rows} == set()


def test_every_entry_counts() -> None:
    """B1: there is no entry in the table that no state ever comes to, so none that no test has checked."""
    reached = set[tuple[Row, Condition | None]]()
    for state in states():
        for table in TABLES:
            for row in table.rows:
                for call in row.calls:
                    holding = (c for c in table.columns if c in row.cells and c.holds(state, call))
                    reached.add((row, next(holding, None)))
    for table in TABLES:
        for row in table.rows:
            for column in (*row.cells, None):
                assert (row, column) in reached, (row.title, column and column.title)
            assert set(row.cells) <= set(table.columns), row.title


def test_the_page() -> None:
    """docs/states.md says what the table says; `python -m tests.lifecycle.state_table` writes it."""
    assert PAGE.read_text() == page(TABLES)
