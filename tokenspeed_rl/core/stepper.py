"""One step after the other: what to compute is decided, computed and taken in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tokenspeed_rl.core.batch import StepPlan
from tokenspeed_rl.core.live_requests import LiveRequests
from tokenspeed_rl.core.model_runner import ModelRunner, StepOutcome
from tokenspeed_rl.core.outcome import (
    fault_of,
    reason_to_end,
    reason_to_end_reading,
    take_draw,
    take_prompt_logprobs,
    take_readings,
    take_routes,
)
from tokenspeed_rl.core.request import FinishReason, Request
from tokenspeed_rl.core.sampler import NOT_FINITE, Sample
from tokenspeed_rl.core.scheduler import Scheduler
from tokenspeed_rl.core.stats import Stats


class StepObserver(Protocol):
    """Sees every step from the loop's thread. What it raises ends the loop."""

    def begins(self, plan: StepPlan) -> None:
        """`plan`, which is not empty, is about to be computed."""

    def ended(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """It was, and its requests have what it brought."""


class Stepper:
    """Takes steps on the loop's thread; what a waiter may look at changes under `lock`."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        live: LiveRequests,
        tokenizer: Any,
        *,
        version: Callable[[], str],
        lock: threading.RLock,
        observers: Sequence[StepObserver] = (),
    ) -> None:
        """`version` labels what is drawn now."""
        self.scheduler = scheduler
        self.runner = runner
        self.stats = Stats()
        self._live = live
        self._tokenizer = tokenizer
        self._version = version
        self._lock = lock
        self._observers = tuple(observers)

    def step(self) -> None:
        """Take one step, if anything can run."""
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        if plan.is_empty:
            return
        for observer in self._observers:
            observer.begins(plan)
        outcome = self.runner.run(plan)
        self.scheduler.advance(plan)
        with self._lock:
            take_prompt_logprobs(outcome, plan.forks)
            take_routes(outcome, plan.forks)
            take_readings(outcome, plan.forks)
            for request in plan.readers:  # before anybody draws: a draw makes its prompt longer
                self._finish_reading(request)
            version = self._version()
            for request, sample in outcome.draws:
                self._accept(request, sample, version, outcome.hidden_states.get(request))
        drawn = sum(request.max_new_tokens > 0 for request, _ in outcome.draws)
        self.stats.count_step(plan, drawn, time.perf_counter() - started, read=len(outcome.readings))
        for observer in self._observers:
            observer.ended(plan, outcome)

    def end(self, request: Request, reason: FinishReason) -> None:
        """Make a request final and take it out of the schedule, unless it ended before. Under the lock."""
        if self._live.close(request, reason, self._version()):
            self.scheduler.remove(request)

    def _finish_reading(self, request: Request) -> None:
        if request not in self._live:  # as below
            return
        reason = reason_to_end_reading(request)
        if reason["type"] == "abort" and self.scheduler.distrust(request):
            return
        self.end(request, reason)

    def _accept(self, request: Request, drawn: Sample, version: str, hidden: list[float] | None) -> None:
        if request not in self._live:  # ended while the step ran, by an abort or by shutdown
            return
        fault = fault_of(request, drawn)
        if fault is not None:
            if fault == NOT_FINITE and self.scheduler.distrust(request):
                return
            self.end(request, {"type": "abort", "message": fault})
            return
        if request.max_new_tokens > 0:
            take_draw(request, drawn, version, hidden)
        reason = reason_to_end(request, self._tokenizer)
        if reason is not None:
            self.end(request, reason)
        else:
            request.publish(request)
