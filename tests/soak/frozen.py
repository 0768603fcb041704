"""Which tokens of which requests are outside the promise of exactness."""

from __future__ import annotations

from typing import Any

from tokenspeed_rl import Engine

Interval = tuple[int, int | None]


class Frozen:
    """Requests that a pause kept across a change of the weights, from the moment of the change to the moment
    they gave up their KV, in output tokens. Seen on the loop's thread, where both happen."""

    def __init__(self, engine: Engine) -> None:
        self._intervals: dict[tuple[str, int], list[Interval]] = {}
        scheduler: Any = engine.client._core.scheduler
        freeze, add = scheduler.freeze, scheduler.add

        def note_freeze() -> None:
            freeze()
            for request in scheduler.running:
                if request.mixed:
                    self._open(request)

        def note_queued(request: Any) -> None:
            self._close(request)
            add(request)

        scheduler.freeze, scheduler.add = note_freeze, note_queued

    def take(self, rid: str, index: int) -> list[Interval]:
        """The intervals of a finished sample, forgotten here from now on."""
        return self._intervals.pop((rid, index), [])

    def forget(self, rid: str) -> None:
        """Nobody will ask for the samples of `rid`."""
        for key in [key for key in list(self._intervals) if key[0] == rid]:
            self._intervals.pop(key, None)

    def _open(self, request: Any) -> None:
        found = self._intervals.setdefault((request.rid, request.index), [])
        if not found or found[-1][1] is not None:
            found.append((request.output_len, None))

    def _close(self, request: Any) -> None:
        found = self._intervals.get((request.rid, request.index), [])
        if found and found[-1][1] is None:
            found[-1] = (found[-1][0], request.output_len)


def inside(at: int, intervals: list[Interval]) -> bool:
    """Whether output token `at` lies in one of them."""
    return any(start <= at and (end is None or at < end) for start, end in intervals)
