"""Sessions alone: who may continue one, and what it holds afterwards."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tokenspeed_rl.errors import EngineStateError, RequestError
from tokenspeed_rl.lifecycle.sessions import Sessions, Turn

NAMES = st.sampled_from("ab")
WAIT = 20.0


class Story:
    """What happened to one session since it was opened: the reference."""

    def __init__(self) -> None:
        self.answered: list[tuple[Any, list[int]]] = []
        """Turns that count, each with its own tokens."""
        self.live: Any = None
        self.final = 0
        """How many of them another turn has followed: nothing takes those back."""

    @property
    def tokens(self) -> list[int]:
        return [token for _, tokens in self.answered for token in tokens]


class Lives(RuleBasedStateMachine):
    """Two names, opened, continued by turns that end in every way, and closed, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted: list[str] = []
        self.sessions = Sessions(abort=self.aborted.append)
        self.open: dict[str, Story] = {}
        self.made: list[tuple[Turn, Story, list[int]]] = []
        self.begun: list[tuple[Turn, Story]] = []
        self.number = 0

    @rule(name=NAMES)
    def open_one(self, name: str) -> None:
        assert self.sessions.open(9, name) == (None if name in self.open else name)
        self.open.setdefault(name, Story())

    @rule(name=NAMES)
    def close_one(self, name: str) -> None:
        if name not in self.open:
            with pytest.raises(RequestError, match="no session"):
                self.sessions.close(name)
            return
        live = self.open.pop(name).live
        self.aborted.clear()
        self.sessions.close(name)
        assert self.aborted == ([] if live is None else [live.rid])

    @rule(name=NAMES)
    def make(self, name: str) -> None:
        story = self.open.get(name)
        if story is None or story.live is not None:
            with pytest.raises(RequestError if story is None else EngineStateError):
                self.sessions.turn(name)
            return
        turn = self.sessions.turn(name)
        assert list(turn.tokens) == story.tokens
        self.made.append((turn, story, story.tokens))

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def begin(self, data: Any) -> None:
        turn, story, tokens = self.made.pop(data.draw(st.integers(0, len(self.made) - 1)))
        if story in self.open.values() and story.live is None and story.tokens == tokens:
            self.number += 1
            turn.check()
            turn.begin(f"r{self.number}")
            story.live, story.final = turn, len(story.answered)
            self.begun.append((turn, story))
        else:
            with pytest.raises((RequestError, EngineStateError)):
                turn.check()

    @precondition(lambda self: self.begun)
    @rule(data=st.data(), answered=st.booleans())
    def end(self, data: Any, answered: bool) -> None:
        turn, story = data.draw(st.sampled_from(self.begun))
        self.number += 1
        turn.end([*turn.tokens, self.number] if answered else None)
        if story.live is turn:
            story.live = None
            if answered:
                story.answered.append((turn, [self.number]))

    @precondition(lambda self: self.begun)
    @rule(data=st.data())
    def give_up(self, data: Any) -> None:
        turn, story = data.draw(st.sampled_from(self.begun))
        turn.give_up()
        if story.live is turn:
            story.live = None
        elif len(story.answered) > story.final and story.answered[-1][0] is turn:
            story.answered.pop()

    @invariant()
    def they_agree(self) -> None:
        assert self.sessions.snapshot() == {
            "count": len(self.open),
            "tokens": sum(len(story.tokens) for story in self.open.values()),
            "live": sum(story.live is not None for story in self.open.values()),
        }
        for name, story in self.open.items():
            if story.live is None:
                assert list(self.sessions.turn(name).tokens) == story.tokens


Lives.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestLives = Lives.TestCase


@pytest.mark.parametrize("capacity", [0, -1, 1.5, True, None, "8"])
def test_a_capacity_is_a_positive_integer(capacity: Any) -> None:
    """Contract 3, 7: anything else is refused with what, got and fix, and opens nothing."""
    sessions = Sessions()
    with pytest.raises(RequestError, match="capacity_of_str_len") as caught:
        sessions.open(capacity, "s")
    assert caught.value.got == repr(capacity) and caught.value.fix
    assert sessions.snapshot()["count"] == 0


@pytest.mark.parametrize("name", ["", 5, ["s"]])
def test_an_id_is_a_string(name: Any) -> None:
    """Contract 3: an id that is none is refused, at the opening, at a turn and at the end."""
    sessions = Sessions()
    with pytest.raises(RequestError, match="session_id"):
        sessions.open(8, name)
    for call in (sessions.turn, sessions.close):
        with pytest.raises(RequestError, match="no session"):
            call(name)


def test_ids_of_the_engines_own_differ() -> None:
    """Contract 3: `session_id=None` makes one up."""
    sessions = Sessions()
    assert len({sessions.open(8) for _ in range(50)}) == sessions.snapshot()["count"] == 50


def test_many_threads_want_the_same() -> None:
    """Contract 7: one live turn at a time: of threads that check and begin under the lock one gets it, each
    time, and each of the others is told why."""
    lock, go = threading.RLock(), threading.Barrier(6)
    sessions, outcomes = Sessions(lock), list[str]()
    sessions.open(1000, "s")

    def compete() -> None:
        for _ in range(50):
            go.wait(WAIT)
            try:
                turn = sessions.turn("s")
                with lock:
                    turn.check()
                    turn.begin("r")
            except EngineStateError:
                outcomes.append("refused")
                go.wait(WAIT)
                continue
            outcomes.append("begun")
            go.wait(WAIT)
            with lock:
                turn.end([*turn.tokens, 1])

    threads = [threading.Thread(target=compete, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert sessions.snapshot() == {"count": 1, "tokens": 50, "live": 0}
    assert (outcomes.count("begun"), outcomes.count("refused")) == (50, 250)
