"""The watchdog, on a clock of the test's."""

from __future__ import annotations

import pytest

from tokenspeed_rl.lifecycle.watchdog import Overdue, Watchdog


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def looked(watchdog: Watchdog) -> list[tuple[str, Overdue]]:
    """What it reports at a look."""
    seen: list[tuple[str, Overdue]] = []
    watchdog.look(lambda each: seen.append(("stuck", each)), lambda each: seen.append(("freed", each)))
    return seen


def test_what_does_not_return_is_overdue_until_it_does() -> None:
    """With its name and for how long; resting, or the next step, is the end of it."""
    clock = Clock()
    watchdog = Watchdog(10.0, clock)
    assert watchdog.overdue is None
    for end in (watchdog.rests, lambda: watchdog.begins("command")):
        watchdog.begins("step")
        clock.now += 10.0
        assert watchdog.overdue is None, "not longer than the timeout"
        clock.now += 2.5
        overdue = watchdog.overdue
        assert overdue is not None and (overdue.what, overdue.seconds) == ("step", 12.5)
        assert str(overdue) == "a step has not returned for 12.5 s"
        end()
        assert watchdog.overdue is None
    clock.now += 1000.0
    watchdog.rests()
    clock.now += 1000.0
    assert watchdog.overdue is None, "an idle engine is not stuck"


def test_many_short_steps_are_fine() -> None:
    """However long they take together."""
    clock = Clock()
    watchdog = Watchdog(1.0, clock)
    for _ in range(100):
        watchdog.begins("step")
        clock.now += 0.9
        assert watchdog.overdue is None and looked(watchdog) == []


@pytest.mark.parametrize("timeout", [None, 5.0])
def test_the_timeout_may_change(timeout: float | None) -> None:
    """None: nothing is ever overdue; a number counts from when the step began."""
    clock = Clock()
    watchdog = Watchdog(timeout, clock)
    watchdog.begins("step")
    clock.now += 1e6
    assert (watchdog.overdue is None) is (timeout is None)
    watchdog.timeout = 2.0 if timeout is None else None
    assert (watchdog.overdue is None) is (timeout is not None)


def test_each_is_reported_once_and_its_end_too() -> None:
    """However often one looks; two in a row are two, also when nobody looked in between."""
    clock = Clock()
    watchdog = Watchdog(1.0, clock)
    watchdog.begins("step")
    clock.now += 2
    (((kind, overdue)),) = looked(watchdog)
    assert (kind, overdue.what, overdue.since) == ("stuck", "step", 100.0)
    assert looked(watchdog) == []
    clock.now += 2
    assert looked(watchdog) == []
    watchdog.begins("command")
    clock.now += 3
    assert [(kind, each.what) for kind, each in looked(watchdog)] == [("freed", "step"), ("stuck", "command")]
    watchdog.rests()
    assert [(kind, each.what) for kind, each in looked(watchdog)] == [("freed", "command")]
    assert looked(watchdog) == []
