"""The states an engine can be in, and what a table of calls and states is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

TAGS = ("weights", "kv_cache", "cuda_graph")
MODES = ("abort", "wait", "keep", "retract")
DRAINS = ("a pause drains", "a release drains")

OK, WAITS, FALSE = "ok", "waits", "False"
STATE, INVALID = "EngineStateError", "WeightsInvalidError"
ENDED = "EngineShutdownError"


@dataclass(frozen=True)
class State:
    """One place on the three axes, whose the weights are, and what else is going on."""

    admission: str = "running"
    """"running", one of MODES, or one of DRAINS: of a pause that waits, and of a release of "kv_cache"."""
    asleep: frozenset[str] = frozenset()
    valid: bool = True
    shared: bool = False
    """Then invalid weights are those of a module whose parameters have moved."""
    moment: str = ""
    """"updating" (half written), "inside" the iterator of that update, "ended" by shutdown, or none of it."""

    def __str__(self) -> str:
        asleep = "+".join(tag for tag in TAGS if tag in self.asleep) + " asleep" if self.asleep else "awake"
        axes = [
            self.admission,
            asleep,
            "valid" if self.valid else "invalid",
            "shared" if self.shared else "own",
        ]
        return ", ".join([*axes, self.moment][: 5 if self.moment else 4])

    @property
    def draining(self) -> bool:
        return self.admission in DRAINS

    @property
    def possible(self) -> bool:
        """A drain ends at once where nothing can run; what is shared, or sleeps, is not being written."""
        if self.draining and (self.asleep or not self.valid):
            return False
        return self.moment not in ("updating", "inside") or not (self.shared or "weights" in self.asleep)


def states() -> list[State]:
    """Every possible state of a living engine with nothing, one or all asleep, and some of the others."""
    sleeps = [frozenset[str](), *(frozenset([tag]) for tag in TAGS), frozenset(TAGS)]
    axes = product(["running", *MODES, *DRAINS], sleeps, [True, False], [False, True])
    living = [State(*place) for place in axes]
    some = [
        State(),
        State(valid=False),
        State("keep"),
        State(DRAINS[0]),
        State(asleep=frozenset(["kv_cache"])),
    ]
    busy = [replace(state, moment=moment) for moment in ("updating", "inside") for state in some]
    ended = [replace(state, moment="ended") for state in living if state.admission in ("running", "keep")]
    return [state for state in [*living, *busy, *ended] if state.possible]


class Call(NamedTuple):
    """A method call, as the tests make it."""

    on: str
    member: str
    arguments: str = ""
    tags: tuple[str, ...] = ()
    """Of a release or wake by name; of any other, none."""
    answers: bool = False
    """Returns False, or (False, why), where others raise EngineStateError."""
    then: Callable[[State], State] = lambda state: state
    """The state after it, where it is ok and was not withdrawn."""

    def __str__(self) -> str:
        return f"{self.on}.{self.member}" + (f"({self.arguments})" if self.arguments else "")


@dataclass(frozen=True, eq=False)
class Condition:
    """A column: something that may hold of a state, for a call."""

    title: str
    holds: Callable[[State, Call], bool]


class Outcome(NamedTuple):
    """What happens, and why."""

    kind: str
    why: str


@dataclass(frozen=True, eq=False)
class Row:
    """Calls that behave alike."""

    title: str
    calls: list[Call]
    cells: Mapping[Condition, Outcome]
    otherwise: Outcome


@dataclass(frozen=True, eq=False)
class Table:
    """Rows under common columns, in the order in which they are judged."""

    title: str
    columns: list[Condition]
    rows: list[Row]

    def outcome(self, row: Row, state: State, call: Call) -> Outcome:
        """Of the first column that describes the state and has an entry; or what happens otherwise."""
        holding = (column for column in self.columns if column in row.cells and column.holds(state, call))
        column = next(holding, None)
        return row.otherwise if column is None else row.cells[column]


# Calls, and the states they lead to

Change = Callable[[State], State]


def calls(
    on: str, *members: str, arguments: str = "", answers: bool = False, then: Change = lambda s: s
) -> list[Call]:
    return [Call(on, member, arguments, answers=answers, then=then) for member in members]


def pauses(on: str, member: str, answers: bool = False) -> list[Call]:
    def to(mode: str) -> Change:
        return lambda state: state if member == "paused" else replace(state, admission=mode)

    return [Call(on, member, f'"{mode}"', answers=answers, then=to(mode)) for mode in MODES]


def releases(*named: str) -> list[Call]:
    """Valid weights of the engine's own do not survive it without a backup."""

    def released(state: State) -> State:
        fresh = frozenset(named or TAGS) - state.asleep
        lost = "weights" in fresh and not state.shared
        return replace(state, asleep=state.asleep | fresh, valid=state.valid and not lost)

    return memory("release_memory_occupation", named, released)


def wakes(*named: str) -> list[Call]:
    return memory(
        "resume_memory_occupation", named, lambda s: replace(s, asleep=s.asleep - frozenset(named or TAGS))
    )


def memory(member: str, named: tuple[str, ...], then: Change) -> list[Call]:
    arguments = ", ".join(f'"{tag}"' for tag in named)
    return [Call(on, member, arguments, named, then=then) for on in ("AsyncLLM", "Engine")]


def by_tag(make: Callable[..., list[Call]]) -> list[Call]:
    return [call for tag in TAGS for call in make(tag)]


def nothing_left(state: State) -> State:
    """What a drain waited for was aborted."""
    if state.admission == DRAINS[0]:
        return replace(state, admission="wait")
    return replace(state, admission="running", asleep=frozenset(["kv_cache"])) if state.draining else state


def running(state: State) -> State:
    return replace(state, admission="running")


def updated(state: State) -> State:
    return replace(state, valid=True)


def borrowed(state: State) -> State:
    return replace(state, valid=True, shared=True)


def gone(state: State) -> State:
    return replace(state, moment="ended")
