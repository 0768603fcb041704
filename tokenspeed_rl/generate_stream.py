"""What `generate_request` returns: one call's results, as an asynchronous generator."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Any

from tokenspeed_rl.core.engine_loop import EngineLoop
from tokenspeed_rl.core.output import StreamCursor, result
from tokenspeed_rl.core.request import ABANDONED, Request
from tokenspeed_rl.errors import EngineStateError, EngineTimeoutError, TokenSpeedError


class Progress:
    """Between the loop and one consumer: the loop's requests hold it, so it knows nothing of the consumer's
    handle.

    Everything here runs under the loop's lock, and nothing of the caller's: what that raises or waits for is
    no business of the loop's thread.
    """

    def __init__(self, *, eager: bool) -> None:
        """`eager`: wake the consumer at all news, not only when everything is finished."""
        self.unfinished = 0
        self.error: TokenSpeedError | None = None
        self._eager = eager
        self._consumer: asyncio.AbstractEventLoop | None = None
        self._wake: Callable[[], None] | None = None

    def publish(self, request: Request) -> None:
        """There is news of `request`."""
        if request.finished:
            self.unfinished -= 1
        gone = self._consumer is not None and self._consumer.is_closed()
        if self._eager or self.unfinished == 0 or gone:
            self._notify()

    def fail(self, error: TokenSpeedError) -> None:
        """There will be no more news."""
        self.error = error
        self._notify()

    def arm(self, on_closed: Callable[[], None]) -> "asyncio.Future[None]":
        """A future of the running event loop, resolved with the next news; `on_closed` if that loop is gone
        by then."""
        loop = self._consumer = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def resolve() -> None:
            if not future.done():
                future.set_result(None)

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(resolve)
            except RuntimeError:
                on_closed()

        self._wake = wake
        return future

    def _notify(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None:
            wake()


class GenerateStream(AsyncGenerator[Any, None]):
    """Results of one call, for one consumer on any event loop.

    Nothing is buffered but the requests themselves: a message is made of all that is new when the consumer
    asks, so a slow one gets longer deltas and loses nothing. Dropped, closed or cancelled before its end, it
    aborts its requests.
    """

    def __init__(
        self,
        loop: EngineLoop,
        requests: list[Request],
        progress: Progress,
        tokenizer: Any,
        *,
        stream: bool,
        as_list: bool,
        on_finish: Callable[[], object] | None,
        check: Callable[[], None] | None,
        may_wait: Callable[[], None],
        owner: object,
    ) -> None:
        """`check` as for `EngineLoop.submit`; `may_wait` raises where waiting would never end; `owner` is the
        engine, which must not be collected before its last result was taken."""
        self._over = True  # nothing to abandon until it is submitted
        self._owner = owner
        self._on_finish = on_finish
        self._may_wait = may_wait
        self._told = 0
        self._turn = threading.Lock()
        self._loop = loop
        self._requests = requests
        self._progress = progress
        self._tokenizer = tokenizer
        self._as_list = as_list
        self._stream = stream
        self._cursors = deque(StreamCursor(request, tokenizer) for request in requests if stream)
        progress.unfinished = len(requests)
        self._over = False  # before, so that an interrupt behind the submission finds something to abandon
        try:
            loop.submit(requests, progress.fail, check)
        except BaseException:
            self.abandon()
            raise

    @property
    def num_samples(self) -> int:
        """Samples of all prompts together."""
        return len(self._requests)

    async def result(self, timeout: float | None = None, *, asked: float | None = None) -> Any:
        """The final result of a call that does not stream; an error names `asked`, of which `timeout` is
        left.

        Raises:
            EngineTimeoutError: not done after `timeout` seconds; its requests were aborted.
        """
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                return await anext(self)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise EngineTimeoutError(
                f"the requests were not done after {asked or timeout:g} s, and were aborted"
            ) from error

    async def __anext__(self) -> Any:
        return await self.asend(None)

    async def asend(self, value: None) -> Any:
        """The next message: a delta, or the one final result (a dict, or a list for a list of prompts or
        samples).

        Raises:
            EngineStateError: another task or thread waits for the next message; that one goes on.
        """
        self._loop.check_home()
        self._may_wait()
        if not self._turn.acquire(blocking=False):
            raise EngineStateError(
                "another task or thread iterates over this stream", fix="Give each its own request."
            )
        try:
            while not self._over:
                with self._loop.lock:
                    finished = len(self._requests) - self._progress.unfinished
                    message = self._take()
                    news = None if message is not None else self._progress.arm(self._abandon_later())
                self._tell(finished)
                if message is not None:
                    return message
                assert news is not None
                await news
        except BaseException:
            self.abandon()
            raise
        finally:
            self._turn.release()
        raise StopAsyncIteration

    async def athrow(
        self,
        typ: type[BaseException] | BaseException,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
    ) -> Any:
        """Abandon the requests and raise."""
        self.abandon()
        error = typ if isinstance(typ, BaseException) else val if isinstance(val, BaseException) else typ()
        raise error.with_traceback(tb)

    async def aclose(self) -> None:
        """Abandon what is unfinished."""
        self.abandon()

    def __del__(self) -> None:
        if not self._over:
            self._over = True
            self._loop.end_soon(self._requests, ABANDONED[0])

    def abandon(self) -> None:
        """End what is unfinished. From any thread; idempotent."""
        if not self._over:
            self._over = True
            self._loop.end(self._requests, ABANDONED[0])

    def _abandon_later(self) -> Callable[[], None]:
        loop, requests = self._loop, self._requests
        return lambda: loop.end(requests, ABANDONED[1])

    def _tell(self, finished: int) -> None:
        while self._on_finish is not None and self._told < finished:
            self._told += 1
            self._on_finish()

    def _take(self) -> Any:
        """A message if one is due; what is finished is delivered even if the engine died since."""
        if not self._stream:
            if self._progress.unfinished == 0:
                whole = self._whole()
                self._over = True
                return whole
        else:
            for _ in range(len(self._cursors)):
                cursor = self._cursors[0]
                self._cursors.rotate(-1)
                if cursor.has_news:
                    message = cursor.take()
                    if cursor.done:
                        self._cursors.remove(cursor)
                    self._over = not self._cursors
                    return message
        if self._progress.error is not None:
            raise self._progress.error
        return None

    def _whole(self) -> Any:
        results = [result(request, self._tokenizer) for request in self._requests]
        return results if self._as_list or len(results) > 1 else results[0]
