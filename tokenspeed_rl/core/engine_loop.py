"""The one thread that steps the model, and the only door to it.

Requests and commands arrive in an inbox and are taken between two steps, in order. Everything a waiter may
look at is written under `lock`, so that a reader on another thread sees whole steps only. If anything raises,
the loop is dead: every request and command, now and later, gets `EngineDeadError` with the first cause.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import torch

from tokenspeed_rl.core.life_cycle import LifeCycle
from tokenspeed_rl.core.live_requests import LiveRequests
from tokenspeed_rl.core.model_runner import ModelRunner
from tokenspeed_rl.core.request import Request
from tokenspeed_rl.core.scheduler import Scheduler
from tokenspeed_rl.core.stepper import StepObserver, Stepper
from tokenspeed_rl.errors import (
    EngineDeadError,
    EngineShutdownError,
    EngineStateError,
    TokenSpeedError,
)
from tokenspeed_rl.lifecycle.reply import answer
from tokenspeed_rl.lifecycle.watchdog import Watchdog

R = TypeVar("R")
JOIN_SECONDS = 60.0
"""How long shutdown waits for the running step."""


class EngineLoop:
    """Owns scheduler and runner on a daemon thread. Every public method may be called from any thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        tokenizer: Any,
        *,
        version: Callable[[], str],
        control: Callable[[], LifeCycle],
        log: logging.Logger,
        observers: Sequence[StepObserver] = (),
        on_end: Callable[[Request], None] | None = None,
        on_exit: Callable[[], None] = lambda: None,
        watchdog: Watchdog | None = None,
    ) -> None:
        """`version` labels what is drawn now; `control` is asked for with the first command; `on_end` is
        called with every request that ends, under `lock`, before its waiter is told; `on_exit` at the end of
        the loop's thread, on it; `watchdog` is told of every step and command."""
        self.scheduler = scheduler
        self.runner = runner
        self.live = LiveRequests(on_end)
        self.lock = threading.RLock()
        self._stepper = Stepper(
            scheduler, runner, self.live, tokenizer, version=version, lock=self.lock, observers=observers
        )
        self.stats = self._stepper.stats
        self._wake = threading.Condition(self.lock)
        self._version = version
        self._control = control
        self._log = log
        self._on_exit = on_exit
        self._watchdog = watchdog or Watchdog(None)
        self._inbox: deque[tuple[Callable[[], Any], Future[Any] | None]] = deque()
        self._unanswered: set[Future[Any]] = set()
        self._submitted: list[Request] = []
        self._cause: BaseException | None = None
        self._closing = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="tokenspeed_rl-loop", daemon=True)
        self._thread.start()

    # Any thread

    def submit(
        self,
        requests: Sequence[Request],
        on_failure: Callable[[TokenSpeedError], None],
        check: Callable[[], None] | None = None,
    ) -> None:
        """Queue requests, all before the same step. `on_failure` is called once if the loop dies or shuts
        down; what `check` raises, under the lock, refuses them.

        Raises:
            RequestError, EngineStateError: as `LiveRequests.add`. EngineShutdownError, EngineDeadError.
                Nothing was queued.
        """
        with self.lock:
            self.check_alive()
            if check is not None:
                check()
            self.live.add(requests, on_failure)
            self._submitted += requests
            self._post(self.take_submitted, None)

    def abort(self, rids: Iterable[str] | None = None, message: str = "aborted") -> None:
        """End the samples of these requests (None: of all) now, with what they have; unknown ids do nothing.

        Waiters are woken at once; pages return before the next step.
        """
        if self.elsewhere:
            return
        with self.lock:
            self.end(self.live.of(rids), message)

    def end(self, requests: Iterable[Request], message: str) -> None:
        """Abort just these samples, whoever uses their ids by now; what is not live stays as it is, but a
        session doesn't keep a turn of theirs."""
        if self.elsewhere:
            return
        requests = list(requests)
        with self.lock:
            _give_up_turns(requests)
            doomed = [request for request in requests if request in self.live]
            for request in doomed:
                self.live.close(request, {"type": "abort", "message": message}, self._version())
            if doomed:
                self._post(lambda: self._remove(doomed), None)

    def end_soon(self, requests: Iterable[Request], message: str) -> None:
        """As `end`, before the next step. Changes nothing here and now but that sessions are free, so a
        finaliser may call it: that can run at any point of a thread, also where this one holds the lock."""
        if self.elsewhere:
            return
        requests = list(requests)
        with self.lock:
            _give_up_turns(requests)
            if self._cause is None and not self._closing:
                self._post(lambda: self.end(requests, message), None)

    def call(self, command: Callable[[], R]) -> "Future[R]":
        """Run `command` on the loop's thread between two steps; its exception reaches the future, not the
        loop."""
        with self.lock:
            self.check_alive()
            future: Future[R] = Future()
            self._post(command, future)
            return future

    def open(self, begin: Callable[[Future[R]], None]) -> "Future[R]":
        """As `call`, for what has not ended when it has begun: `begin` gets the future, to be answered later.

        Cancelling it wakes the loop, whose control then finds the caller gone.
        """
        with self.lock:
            self.check_alive()
            reply: Future[R] = Future()
            self._unanswered.add(reply)
            reply.add_done_callback(self._answered)
            self._post(partial(_begin, begin, reply), None)
            return reply

    def check_home(self) -> None:
        """Raises EngineStateError in a forked child, where nothing would ever answer."""
        if self.elsewhere:
            raise EngineStateError(
                "this engine lives in the parent of this forked process", fix="Use it there only."
            )

    def check_alive(self) -> None:
        """Raises EngineDeadError or EngineShutdownError where the loop takes nothing any more."""
        self.check_home()
        if self._cause is not None:
            raise EngineDeadError(
                "the engine's loop failed; see the cause, and make a new engine"
            ) from self._cause
        if self._closing:
            raise EngineShutdownError("the engine has been shut down; make a new one")

    def shutdown(self) -> None:
        """End the loop after the running step; whoever waits gets EngineShutdownError. Idempotent."""
        if self.elsewhere:
            return
        with self.lock:
            if not self._closing:
                self._closing = True
                self._fail_all(
                    lambda: EngineShutdownError("the engine was shut down while this was going on")
                )
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_SECONDS)

    @property
    def elsewhere(self) -> bool:
        """Whether this is a forked child, which has neither the loop's thread nor, perhaps, a free lock."""
        return os.getpid() != self._pid

    @property
    def closing(self) -> bool:
        """Whether shutdown has begun."""
        return self._closing

    @property
    def num_live(self) -> int:
        """Unfinished samples, without the lock: a step that hangs may hold it."""
        return len(self.live)

    @property
    def thread(self) -> threading.Thread:
        """The loop's own."""
        return self._thread

    # The loop's thread

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # a property of this thread alone
        taken: deque[tuple[Callable[[], Any], Future[Any] | None]] = deque()
        try:
            while not self._closing:
                taken = self._take_inbox()
                while taken:
                    self._watchdog.begins("command")
                    _obey(*taken.popleft())  # whose frame ends with all that the command holds
                    self._control().settle()
                if self._can_step():
                    self._watchdog.begins("step")
                    self._stepper.step()
                    self._control().settle()
        except BaseException as error:
            with self.lock:
                failed = not self._closing
                if failed:
                    self._cause = error
                self._inbox.extendleft(reversed(taken))  # behind the command that failed
                self._fail_all(partial(_dead, error))  # when closing, all but these were told
            if failed:
                self._log.error("the engine's loop failed; all its callers were told", exc_info=error)
        finally:
            self._watchdog.rests()
            self._on_exit()

    def _take_inbox(self) -> "deque[tuple[Callable[[], Any], Future[Any] | None]]":
        """What has arrived; waits for something to do."""
        with self._wake:
            while not (self._inbox or self._can_step() or self._closing):
                self._watchdog.rests()
                self._wake.wait()
            taken, self._inbox = self._inbox, deque()
        return taken

    def _can_step(self) -> bool:
        return self.scheduler.has_work and not self._closing and self._control().can_step

    def take_submitted(self) -> None:
        """Give the control what has been submitted so far, also behind the command that is running. On the
        loop's thread."""
        with self.lock:
            submitted, self._submitted = self._submitted, []
        self._control().enqueue(submitted)

    def end_all(self, message: str) -> None:
        """End every unfinished request now, and take it out of the schedule. On the loop's thread."""
        self.end_where(lambda request: message)

    def end_where(
        self, why: Callable[[Request], str | None], requests: Iterable[Request] | None = None
    ) -> None:
        """End those of the requests (None: of all that live) that `why` has a message for. On the loop's
        thread."""
        with self.lock:
            for request in self.live if requests is None else requests:
                message = why(request)
                if message is not None:
                    self._stepper.end(request, {"type": "abort", "message": message})

    def fit(self, capacity: int, requests: Iterable[Request] | None = None) -> None:
        """The KV cache holds `capacity` tokens: end those of the requests (None: of all that live) that could
        never be served, and what asked for as much as there is room for gets less. On the loop's thread."""
        with self.lock:
            for request in self.live if requests is None else requests:
                room = capacity - request.prompt_len
                if request.params.max_new_tokens is None and room > request.output_len:
                    request.max_new_tokens = min(request.max_new_tokens, room)
                elif request.max_new_tokens > room:
                    message = f"the KV cache holds {capacity} tokens since the wake, fewer than it may need"
                    self._stepper.end(request, {"type": "abort", "message": message})

    def _remove(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.scheduler.remove(request)

    # Under the lock

    def _answered(self, reply: "Future[Any]") -> None:
        with self.lock:
            self._unanswered.discard(reply)
            if reply.cancelled() and self._cause is None and not self._closing:
                self._post(lambda: None, None)

    def _post(self, command: Callable[[], object], future: "Future[Any] | None") -> None:
        self._inbox.append((command, future))
        self._wake.notify()

    def _fail_all(self, make_error: Callable[[], TokenSpeedError]) -> None:
        """Tell everyone, each with an error of its own: one object raised in several threads mixes their
        tracebacks."""
        waiters = self.live.clear()
        commands, self._inbox = self._inbox, deque()
        unanswered = list(self._unanswered)
        for tell in waiters:
            tell(make_error())
        for _, future in commands:
            if future is not None:
                answer(future, _raiser(make_error()))
        for reply in unanswered:
            answer(reply, _raiser(make_error()))


def _give_up_turns(requests: Iterable[Request]) -> None:
    for request in requests:
        if request.turn is not None:
            request.turn.give_up()


def _obey(command: Callable[[], Any], future: "Future[Any] | None") -> None:
    if future is None:
        command()  # the loop's own: if it fails, so does the loop
    else:
        answer(future, command)


def _begin(begin: "Callable[[Future[Any]], None]", reply: "Future[Any]") -> None:
    """Begin what ends later; its exception is the caller's, not the loop's."""
    if reply.done():
        return
    try:
        begin(reply)
    except BaseException as error:
        answer(reply, _raiser(error))


def _dead(cause: BaseException) -> EngineDeadError:
    error = EngineDeadError(f"the engine's loop failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def _raiser(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail
