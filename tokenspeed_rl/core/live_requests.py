"""The unfinished samples, whoever waits for them, and how one ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from tokenspeed_rl.core.request import FinishReason, Request, Span
from tokenspeed_rl.errors import RequestError, TokenSpeedError

OnFailure = Callable[[TokenSpeedError], None]


class LiveRequests:
    """By id and by sample, from submission to the end. Every method is called under the loop's lock."""

    def __init__(self, on_end: Callable[[Request], None] | None = None) -> None:
        """`on_end` is called with every request that ends, before its waiter is told."""
        self._on_end = on_end
        self._by_rid: dict[str, list[Request]] = {}
        self._on_failure: dict[Request, OnFailure] = {}

    def __len__(self) -> int:
        return len(self._on_failure)

    def __contains__(self, request: Request) -> bool:
        return request in self._on_failure

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._on_failure))

    def add(self, requests: Sequence[Request], on_failure: OnFailure) -> None:
        """Take all of them in, or none; turns of sessions begin.

        Raises:
            RequestError: an id is live already, or a session was closed. EngineStateError: a session goes on
                otherwise.
        """
        if taken := {request.rid for request in requests} & self._by_rid.keys():
            raise RequestError(
                "this rid belongs to a live request",
                got=min(taken),
                fix="Use it again after that one's end.",
            )
        turns = [(request.turn, request.rid) for request in requests if request.turn is not None]
        for turn, _ in turns:
            turn.check()
        for request in requests:
            self._by_rid.setdefault(request.rid, []).append(request)
            self._on_failure[request] = on_failure
        for turn, rid in turns:
            turn.begin(rid)

    def of(self, rids: Iterable[str] | None) -> list[Request]:
        """The samples of these ids (None: all)."""
        names = list(self._by_rid) if rids is None else rids
        return [request for rid in names for request in self._by_rid.get(rid, ())]

    def close(self, request: Request, reason: FinishReason, version: str) -> bool:
        """Make a request final and tell its waiter; False if it was not live (any more)."""
        if request not in self._on_failure:
            return False
        if not request.spans:
            request.spans.append(Span(version, 0, 0))
        request.finished_at = time.monotonic()
        request.finish_reason = reason
        siblings = self._by_rid[request.rid]
        siblings.remove(request)
        if not siblings:
            del self._by_rid[request.rid]
        del self._on_failure[request]
        if request.turn is not None:
            request.turn.end(None if reason["type"] == "abort" else request.tokens)
        if self._on_end is not None:
            self._on_end(request)
        request.publish(request)
        return True

    def clear(self) -> list[OnFailure]:
        """Forget all; returns whom to tell, each once."""
        waiters = list(dict.fromkeys(self._on_failure.values()))
        self._by_rid.clear()
        self._on_failure.clear()
        return waiters
