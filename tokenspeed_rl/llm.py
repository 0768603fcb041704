"""LLM: the synchronous face of an AsyncLLM, for code that blocks."""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from tokenspeed_rl.async_llm import AsyncLLM, without_stream
from tokenspeed_rl.errors import EngineShutdownError, EngineStateError, EngineTimeoutError, RequestError
from tokenspeed_rl.requests import EmbeddingReqInput, GenerateReqInput
from tokenspeed_rl.sampling_params import check_timeout

R = TypeVar("R")
JOIN_SECONDS = 10.0
"""How long shutdown waits for cancelled coroutines."""
UNWIND_SECONDS = 1.0
"""How long a caller that gives up waits for its cancelled coroutine."""


class LLM:
    """Runs coroutines on one event loop of its own, on a daemon thread. Any thread may call, several at
    once."""

    def __init__(self, async_llm: AsyncLLM) -> None:
        self.async_llm = async_llm
        self._closed = threading.Event()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._pending: set[concurrent.futures.Future[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_serve, args=(self._loop,), name="tokenspeed_rl-llm", daemon=True
        )
        self._thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._loop, self._thread, self._closed, self._pid)

    def run(self, coro: Coroutine[Any, Any, R], timeout: float | None = None) -> R:
        """Run `coro` to its end and return its result. Interrupted, or after `timeout` seconds, it is
        cancelled.

        Raises:
            RequestError: not a coroutine, or no timeout. EngineTimeoutError: the timeout passed.
            EngineShutdownError: after or during `shutdown`.
            EngineStateError: called on the event loop's own thread, where waiting would never end, or in a
                forked child, which has no such thread.
        """
        if not asyncio.iscoroutine(coro):
            raise RequestError("run() takes a coroutine", got=coro, fix="Pass llm.run(client.flush_cache()).")
        future: concurrent.futures.Future[R] = concurrent.futures.Future()
        try:  # whatever interrupts this from here on finds a future to cancel
            seconds = check_timeout(timeout)
            self._schedule(coro, future)
            return _result(future, seconds)
        except concurrent.futures.CancelledError:
            if self._closed.is_set():
                raise EngineShutdownError("the LLM was shut down while this was going on") from None
            raise
        finally:
            if future in self._pending:
                self._withdraw(future)
            elif not future.done():
                coro.close()  # it was refused

    def generate(
        self,
        obj: GenerateReqInput | EmbeddingReqInput,
        timeout: float | None = None,
        *,
        wait: bool = False,
    ) -> Any:
        """The final result of `obj`, also of a streaming one: a dict, or a list as `generate_request` says.

        Prompts are tokenised on the caller's thread, within the timeout.

        Raises:
            EngineTimeoutError: not done after `timeout` seconds; its requests were aborted.
            EngineStateError, WeightsInvalidError: asleep, paused, or no complete set of weights, and not
                `wait`: who blocks would never change it.
        """
        return self._generate(obj, timeout, wait)

    def generate_with_bar(
        self,
        obj: GenerateReqInput | EmbeddingReqInput,
        timeout: float | None = None,
        *,
        wait: bool = False,
    ) -> Any:
        """As `generate`, under a progress bar that counts samples."""
        from tqdm.auto import tqdm  # only where a bar is asked for

        with tqdm(unit="sample") as bar:
            return self._generate(obj, timeout, wait, bar)

    def _generate(self, obj: Any, timeout: float | None, wait: bool, bar: Any = None) -> Any:
        check_timeout(timeout)
        started = time.monotonic()
        on_finish = None if bar is None else lambda: bar.update(1)
        stream = self.async_llm.submit(without_stream(obj), wait=wait, on_finish=on_finish)
        if bar is not None:
            bar.total = stream.num_samples
        try:
            left = None if timeout is None else max(0.0, timeout - (time.monotonic() - started))
            return self.run(stream.result(left, asked=timeout))
        finally:
            stream.abandon()

    def generate_stream(self, obj: GenerateReqInput, *, wait: bool = False) -> Iterator[dict[str, Any]]:
        """The messages of `generate_request`, one by one. Dropping the iterator aborts the request. Raises as
        `generate`."""
        return self._iterate(self.async_llm.submit(obj, wait=wait))

    def _iterate(self, stream: Any) -> Iterator[dict[str, Any]]:
        try:
            while True:
                try:
                    message = self.run(stream.asend(None))
                except StopAsyncIteration:
                    return
                yield message
        finally:
            stream.abandon()

    def shutdown(self) -> None:
        """End the facade, not the AsyncLLM behind it; whoever waits in it gets EngineShutdownError.
        Idempotent."""
        with self._lock:
            self._closed.set()
            pending = list(self._pending)
        for future in pending:
            future.cancel()  # its caller is woken even if the coroutine won't end
        self._finalizer()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_SECONDS)  # another thread's call may be the one that ends it

    def _schedule(self, coro: Coroutine[Any, Any, R], future: "concurrent.futures.Future[R]") -> None:
        if os.getpid() != self._pid:
            raise EngineStateError(
                "this engine lives in the parent of this forked process", fix="Use it there only."
            )
        if threading.current_thread() is self._thread:
            raise EngineStateError(
                "run() was called from a coroutine that run() runs", fix="Await it instead."
            )
        with self._lock:  # what is scheduled before the loop is told to stop is cancelled, not lost
            if self._closed.is_set():
                raise EngineShutdownError("this LLM has been shut down; make a new one")
            self._pending.add(future)
            future.add_done_callback(self._pending.discard)
            self._loop.call_soon_threadsafe(_start, self._loop, coro, future)

    def _withdraw(self, future: "concurrent.futures.Future[R]") -> None:
        """Cancel, and give the coroutine a moment to let go of what it holds: its requests, its rids."""
        future.cancel()
        unwound = threading.Event()
        with contextlib.suppress(RuntimeError):  # the event loop has ended, and cancelled everything
            self._loop.call_soon_threadsafe(self._loop.call_soon, unwound.set)
            unwound.wait(UNWIND_SECONDS)


def _start(
    loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, R], future: "concurrent.futures.Future[R]"
) -> None:
    """On the event loop: run `coro` into `future`, and cancel it with that."""
    if future.done():
        coro.close()
        return
    task = loop.create_task(coro)

    def finish(task: "asyncio.Task[R]") -> None:
        if task.cancelled():
            future.cancel()
            error: BaseException | None = None
        else:
            error = task.exception()
        if not future.set_running_or_notify_cancel():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())

    def stop(future: "concurrent.futures.Future[R]") -> None:
        if future.cancelled():
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(task.cancel)

    task.add_done_callback(finish)
    future.add_done_callback(stop)


def _result(future: "concurrent.futures.Future[R]", timeout: float | None) -> R:
    try:
        return future.result(timeout)
    except TimeoutError:
        if not future.done():
            raise EngineTimeoutError(f"not done after {timeout} s; it was cancelled") from None
    return future.result()  # a TimeoutError of its own, or it was done at the last moment


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        _run_until_stopped(loop)
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=JOIN_SECONDS))
    finally:
        loop.close()


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            return loop.run_forever()
        except (KeyboardInterrupt, SystemExit):  # raised by one task: its caller gets it, the others go on
            continue


def _stop(
    loop: asyncio.AbstractEventLoop, thread: threading.Thread, closed: threading.Event, pid: int
) -> None:
    if os.getpid() != pid:  # a forked child has no such thread
        return
    closed.set()
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join(JOIN_SECONDS)
