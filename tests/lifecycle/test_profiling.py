"""Which steps a profile records: the pure machine, driven step by step."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed_rl.errors import EngineStateError, RequestError
from tokenspeed_rl.lifecycle.profiling import Plan, Profiling


class Tape:
    """Notes which steps lie in which stretch, and fails where it is told to."""

    def __init__(self, fails: str = "") -> None:
        self.stretches: list[tuple[str, list[int]]] = []
        self.open = self.dropped = False
        self._fails = fails

    def begin(self, kind: str) -> None:
        self._check("begin")
        assert not self.open
        self.open = True
        self.stretches.append((kind, []))

    def finish(self) -> None:
        self._check("finish")
        assert self.open
        self.open = False

    def write(self) -> list[str]:
        self._check("write")
        assert not self.open
        return sorted({kind for kind, _ in self.stretches})

    def drop(self) -> None:
        self.dropped = True

    def _check(self, call: str) -> None:
        if call == self._fails:
            raise OSError("the disk is full")


class Run:
    """A profile over a sequence of steps, p (prefill) and d (decode)."""

    def __init__(self, plan: Plan, *, steps: int = 0, fails: str = "") -> None:
        self.steps = steps
        self.tape = Tape(fails)
        self.profiling = Profiling()
        self.profiling.start(plan, self.tape, steps)

    def take(self, stages: str) -> list[tuple[str, list[int]]]:
        for stage in stages:
            self.profiling.begins({"p": "prefill", "d": "decode"}[stage], self.steps)
            if self.profiling.kind is not None:
                self.tape.stretches[-1][1].append(self.steps)
            self.steps += 1
            self.profiling.ended()
        return self.tape.stretches


def test_until_it_is_stopped() -> None:
    """Every step from the next on, in one stretch; the files are those of the recorder."""
    run = Run(Plan(), steps=5)
    assert run.profiling.snapshot()["state"] == "waiting"
    assert run.take("pdd") == [("steps", [5, 6, 7])]
    assert run.profiling.snapshot() == {"state": "running", "steps": {"steps": 3}, "files": [], "error": None}
    assert run.profiling.stop() == ["steps"]
    assert run.profiling.state == "idle" and not run.profiling.active
    assert run.take("dd") == [("steps", [5, 6, 7])]
    with pytest.raises(EngineStateError, match="no profile"):
        run.profiling.stop()


def test_from_a_step_on_and_so_many() -> None:
    """It waits for its step, ends by itself, tells the files once, and may start again."""
    run = Run(Plan(start_step=4, num_steps=2), steps=2)
    assert run.take("pddddd") == [("steps", [4, 5])]
    shown = run.profiling.snapshot()
    assert (shown["state"], shown["steps"], shown["files"]) == ("ended", {"steps": 2}, ["steps"])
    assert run.profiling.stop() == ["steps"]
    with pytest.raises(EngineStateError):
        run.profiling.stop()
    run.profiling.start(Plan(), Tape(), run.steps)
    assert run.profiling.snapshot() == {"state": "waiting", "steps": {}, "files": [], "error": None}


def test_by_stage() -> None:
    """Each stage is counted for itself, in as many stretches as it comes in; nothing else is recorded."""
    run = Run(Plan(num_steps=3, by_stage=True))
    assert run.take("ppddpdddpp") == [
        ("prefill", [0, 1]),
        ("decode", [2, 3]),
        ("prefill", [4]),
        ("decode", [5]),
    ]
    assert run.profiling.state == "ended" and run.profiling.files == ["decode", "prefill"]


def test_a_stage_that_is_full_waits_for_the_other() -> None:
    """Steps of a stage that has its number aren't recorded, and the recorder rests in them."""
    run = Run(Plan(num_steps=2, by_stage=True))
    assert run.take("ddddd") == [("decode", [0, 1])]
    assert run.profiling.state == "running" and not run.tape.open
    assert run.take("pdp")[1:] == [("prefill", [5]), ("prefill", [7])]
    assert run.profiling.state == "ended"


def test_start_twice_and_too_late() -> None:
    """The profile that is going on goes on; a first step that is over is refused, with the number of now."""
    run = Run(Plan(start_step=3))
    for _ in ("waiting", "running"):
        with pytest.raises(EngineStateError, match="going on"):
            run.profiling.start(Plan(), Tape(), run.steps)
        run.take("dddd")
    assert run.profiling.stop() == ["steps"]
    with pytest.raises(RequestError, match="taken 8 steps"):
        run.profiling.start(Plan(start_step=7), Tape(), run.steps)
    assert not run.profiling.active


def test_stopped_before_its_first_step() -> None:
    """Nothing was recorded, and there are no files."""
    run = Run(Plan(start_step=9))
    run.take("pd")
    assert run.profiling.stop() == [] and run.tape.stretches == []


@pytest.mark.parametrize("fails", ["begin", "finish", "write"])
def test_what_fails_ends_the_profile_alone(fails: str) -> None:
    """The steps go on, the recorder cleans up, `stop` tells why, and another profile may start."""
    run = Run(Plan(num_steps=2), fails=fails)
    run.take("pdd")
    shown: dict[str, Any] = run.profiling.snapshot()
    assert shown["state"] == "ended" and "disk is full" in shown["error"]
    assert run.tape.dropped and not run.profiling.active
    with pytest.raises(EngineStateError, match="disk is full"):
        run.profiling.stop()
    run.profiling.start(Plan(), Tape(), run.steps)
    assert run.profiling.error is None
