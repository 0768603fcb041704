"""Whether the loop is stuck: in a step or a command that does not return."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple


class Overdue(NamedTuple):
    """Something that has not returned in time."""

    what: str
    since: float
    """On the watchdog's clock."""
    seconds: float
    """So far."""

    def __str__(self) -> str:
        return f"a {self.what} has not returned for {self.seconds:.1f} s"


class Watchdog:
    """The loop's thread says what it begins and when it rests; any thread may ask whether that is overdue.

    It costs the loop a look at the clock for each step. It recovers by itself: what returns is not overdue.
    """

    def __init__(self, timeout: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`timeout` in seconds, None: nothing is ever overdue; it may change at any time."""
        self.timeout = timeout
        self._clock = clock
        self._doing: tuple[str, float] | None = None  # replaced as a whole, so that readers need no lock
        self._reported: Overdue | None = None

    def begins(self, what: str) -> None:
        """The loop begins this, so what it did before has returned."""
        self._doing = what, self._clock()

    def rests(self) -> None:
        """The loop waits for something to do."""
        self._doing = None

    @property
    def overdue(self) -> Overdue | None:
        """What takes longer than the timeout."""
        doing, timeout = self._doing, self.timeout
        if doing is None or timeout is None:
            return None
        seconds = self._clock() - doing[1]
        return Overdue(*doing, seconds) if seconds > timeout else None

    def look(self, stuck: Callable[[Overdue], object], freed: Callable[[Overdue], object]) -> None:
        """Call `stuck` when something has become overdue, and `freed` when that has returned, each once. One
        thread looks."""
        overdue, before = self.overdue, self._reported
        if before is not None and (overdue is None or overdue.since != before.since):
            self._reported = None
            freed(before)
        if overdue is not None and self._reported is None:
            self._reported = overdue
            stuck(overdue)
