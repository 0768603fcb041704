"""What happened, who is stuck, and what went wrong."""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter, deque

KEPT = 400


class Journal:
    """Calls of all threads in the order of their ends, what is under way, counts and faults. Any thread's."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.counts: Counter[str] = Counter()
        self.stop = threading.Event()
        self.slowest_status = 0.0
        self._lines: deque[str] = deque(maxlen=KEPT)
        self._doing: dict[str, tuple[float, str]] = {}
        self._lock = threading.Lock()
        self._began = time.monotonic()

    def begin(self, thread: str, call: str) -> None:
        """`thread` makes `call` now."""
        with self._lock:
            self._doing[thread] = (time.monotonic(), call)

    def end(self, thread: str, outcome: str) -> None:
        """The call of `thread` has ended."""
        with self._lock:
            began, call = self._doing.pop(thread)
            at = began - self._began
            self._lines.append(f"{at:9.3f} +{time.monotonic() - began:.3f} {thread:>3} {call}: {outcome}")
            self.counts[f"{call.split()[1]} {outcome.split(':')[0]}"] += 1

    def count(self, what: str, number: int = 1) -> None:
        """Add to a total."""
        with self._lock:
            self.counts[what] += number

    def status_took(self, seconds: float) -> None:
        """A status call took so long."""
        with self._lock:
            self.slowest_status = max(self.slowest_status, seconds)

    def fault(self, what: str) -> None:
        """Something is wrong; the soak ends."""
        with self._lock:
            self.faults.append(what)
        self.stop.set()

    def crashed(self, thread: str, error: BaseException) -> None:
        """`thread` ended with an exception that no promise allows."""
        _, call = self._doing.get(thread, (0.0, "between two calls"))
        self.fault(f"{thread} {call}: {''.join(traceback.format_exception(error))}")

    def stuck(self, seconds: float) -> list[str]:
        """Calls that have gone on for longer than so many seconds."""
        now = time.monotonic()
        with self._lock:
            return [
                f"{thread} {call}, for {now - began:.0f} s"
                for thread, (began, call) in self._doing.items()
                if now - began > seconds
            ]

    def last(self, number: int) -> list[str]:
        """The last calls that ended, and those under way."""
        with self._lock:
            under_way = [f"under way: {thread} {call}" for thread, (_, call) in self._doing.items()]
            return [*list(self._lines)[-number:], *under_way]
