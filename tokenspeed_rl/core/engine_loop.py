"""The one thread that steps the model, and the only door to it.

Requests and commands arrive in an inbox and are taken between two steps, in order. Everything a waiter may
look at is written under `lock`, so that a reader on another thread sees whole steps only. If anything raises,
the loop is dead: every request and command, now and later, gets `EngineDeadError` with the first cause.
"""

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import torch

from tokenspeed_rl.core.model_runner import ModelRunner, StepOutcome
from tokenspeed_rl.core.request import FinishReason, Request, Span
from tokenspeed_rl.core.sampler import NOT_FINITE, Sample
from tokenspeed_rl.core.scheduler import Scheduler
from tokenspeed_rl.core.stats import Stats
from tokenspeed_rl.core.stop import check_stop
from tokenspeed_rl.errors import (
    EngineDeadError,
    EngineShutdownError,
    EngineStateError,
    RequestError,
    TokenSpeedError,
)

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
        gate: Callable[[], bool],
        log: logging.Logger,
    ) -> None:
        """`version` labels what is drawn now; while `gate` is False nothing runs and requests wait."""
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.stats = Stats()
        self.lock = threading.RLock()
        self._wake = threading.Condition(self.lock)
        self._version = version
        self._gate = gate
        self._log = log
        self._inbox: deque[tuple[Callable[[], Any], Future[Any] | None]] = deque()
        self._live: dict[str, list[Request]] = {}
        self._on_failure: dict[Request, Callable[[TokenSpeedError], None]] = {}
        self._cause: BaseException | None = None
        self._closing = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="tokenspeed_rl-loop", daemon=True)
        self._thread.start()

    # Any thread

    def submit(self, requests: Sequence[Request], on_failure: Callable[[TokenSpeedError], None]) -> None:
        """Queue requests, all before the same step. `on_failure` is called once if the loop dies or shuts
        down.

        Raises:
            RequestError: an id is live already. EngineShutdownError, EngineDeadError. Nothing was queued.
        """
        with self.lock:
            self.check_alive()
            if taken := {request.rid for request in requests} & self._live.keys():
                raise RequestError(
                    "this rid belongs to a live request",
                    got=min(taken),
                    fix="Use it again after that one's end.",
                )
            for request in requests:
                self._live.setdefault(request.rid, []).append(request)
                self._on_failure[request] = on_failure
            self._post(lambda: self._enqueue(requests), None)

    def abort(self, rids: Iterable[str] | None = None, message: str = "aborted") -> None:
        """End the samples of these requests (None: of all) now, with what they have; unknown ids do nothing.

        Waiters are woken at once; pages return before the next step.
        """
        if self._elsewhere:
            return
        with self.lock:
            names = list(self._live) if rids is None else rids
            self.end([request for rid in names for request in self._live.get(rid, ())], message)

    def end(self, requests: Iterable[Request], message: str) -> None:
        """Abort just these samples, whoever uses their ids by now; what is not live stays as it is."""
        if self._elsewhere:
            return
        with self.lock:
            doomed = [request for request in requests if request in self._on_failure]
            for request in doomed:
                self._close(request, {"type": "abort", "message": message})
            if doomed:
                self._post(lambda: self._remove(doomed), None)

    def end_soon(self, requests: Iterable[Request], message: str) -> None:
        """As `end`, before the next step. Changes nothing here and now, so a finaliser may call it: that can
        run at any point of a thread, also where this one holds the lock."""
        if self._elsewhere:
            return
        with self.lock:
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

    def check_home(self) -> None:
        """Raises EngineStateError in a forked child, where nothing would ever answer."""
        if self._elsewhere:
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
        if self._elsewhere:
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
    def _elsewhere(self) -> bool:
        """Whether this is a forked child, which has neither the loop's thread nor, perhaps, a free lock."""
        return os.getpid() != self._pid

    @property
    def closing(self) -> bool:
        """Whether shutdown has begun."""
        return self._closing

    @property
    def num_live(self) -> int:
        """Unfinished samples."""
        with self.lock:
            return sum(map(len, self._live.values()))

    # The loop's thread

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # a property of this thread alone
        taken: deque[tuple[Callable[[], Any], Future[Any] | None]] = deque()
        try:
            while not self._closing:
                taken = self._take_inbox()
                while taken:
                    command, future = taken.popleft()
                    if future is None:
                        command()  # the loop's own: if it fails, so does the loop
                    else:
                        _complete(future, command)
                if self._can_step():
                    self._step()
        except BaseException as error:
            with self.lock:
                if not self._closing:
                    self._cause = error
                    self._log.error("the engine's loop failed; all its callers are told", exc_info=error)
                self._inbox.extendleft(reversed(taken))  # behind the command that failed
                self._fail_all(partial(_dead, error))  # when closing, all but these were told

    def _take_inbox(self) -> "deque[tuple[Callable[[], Any], Future[Any] | None]]":
        """What has arrived; waits for something to do."""
        with self._wake:
            while not (self._inbox or self._can_step() or self._closing):
                self._wake.wait()
            taken, self._inbox = self._inbox, deque()
        return taken

    def _can_step(self) -> bool:
        return self.scheduler.has_work and not self._closing and self._gate()

    def _step(self) -> None:
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        if plan.is_empty:
            return
        outcome = self.runner.run(plan)
        self.scheduler.advance(plan)
        with self.lock:
            self._take_prompt_logprobs(outcome, plan.forks)
            version = self._version()
            for request, sample in outcome.draws:
                self._accept(request, sample, version, outcome.hidden_states.get(request))
        drawn = sum(request.max_new_tokens > 0 for request, _ in outcome.draws)
        self.stats.count_step(plan, drawn, time.perf_counter() - started)

    def _take_prompt_logprobs(self, outcome: StepOutcome, forks: dict[Request, Request]) -> None:
        for request, values in outcome.prompt_logprobs:
            request.prompt_logprobs += values
        for fork, leader in forks.items():
            if fork.wants.prompt_start >= 0:
                fork.prompt_logprobs = list(leader.prompt_logprobs)

    def _accept(self, request: Request, drawn: Sample, version: str, hidden: list[float] | None) -> None:
        if request not in self._on_failure:  # ended while the step ran, by an abort or by shutdown
            return
        fault = drawn.fault
        if request.output_len == 0 and not all(map(math.isfinite, request.prompt_logprobs)):
            fault = NOT_FINITE  # with a sliding window the last position may not see it
        if fault is not None:
            self.scheduler.cache.forget(request.pages)
            self._end(request, {"type": "abort", "message": fault})
            return
        if request.max_new_tokens == 0:
            self._end(request, {"type": "length", "length": 0})
            return
        request.record(drawn.token, version)
        for kind, value in drawn.logprobs.items():
            request.logprobs.setdefault(kind, []).append(value)
        if request.wants.top:
            request.top_logprobs.append(drawn.top)
        if request.wants.token_ids:
            request.ids_logprobs.append(drawn.ids)
        if request.wants.sampling_mask:
            request.masks.append(drawn.mask)
        if hidden is not None:
            request.hidden_states.append(hidden)
        try:
            reason = check_stop(request, self.tokenizer)
        except Exception as error:  # the caller's tokenizer: what it raises is this request's alone
            reason = {"type": "abort", "message": f"the tokenizer failed: {type(error).__name__}: {error}"}
        if reason is not None:
            self._end(request, reason)
        else:
            request.publish(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request in self._on_failure:
            self._close(request, reason)
            self.scheduler.remove(request)

    def _enqueue(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if not request.finished:
                self.scheduler.add(request)

    def _remove(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.scheduler.remove(request)

    # Under the lock

    def _post(self, command: Callable[[], object], future: "Future[Any] | None") -> None:
        self._inbox.append((command, future))
        self._wake.notify()

    def _close(self, request: Request, reason: FinishReason) -> None:
        """Make a request final and tell its waiter."""
        if request not in self._on_failure:
            return  # telling another waiter ended this one too
        if not request.spans:
            request.spans.append(Span(self._version(), 0, 0))
        request.finished_at = time.monotonic()
        request.finish_reason = reason
        siblings = self._live[request.rid]
        siblings.remove(request)
        if not siblings:
            del self._live[request.rid]
        del self._on_failure[request]
        request.publish(request)

    def _fail_all(self, make_error: Callable[[], TokenSpeedError]) -> None:
        """Tell everyone, each with an error of its own: one object raised in several threads mixes their
        tracebacks."""
        failures = dict.fromkeys(self._on_failure.values())
        commands, self._inbox = self._inbox, deque()
        self._live.clear()
        self._on_failure.clear()
        for tell in failures:
            tell(make_error())
        for _, future in commands:
            if future is not None:
                _complete(future, _raiser(make_error()))


def _complete(future: "Future[Any]", command: Callable[[], Any]) -> None:
    """Run a command into its future; its exception is the caller's, not the loop's."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = command()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def _dead(cause: BaseException) -> EngineDeadError:
    error = EngineDeadError(f"the engine's loop failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def _raiser(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail
