"""The three axes of the engine's state, and the calls that move along them.

Admission, residency and validity are independent. Everything here runs on the loop's thread, between two
steps, but for the properties, which any thread may read, and `require_runnable`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress

from tokenspeed_rl.cache.prefix_cache import PrefixCache
from tokenspeed_rl.core.request import Request
from tokenspeed_rl.core.scheduler import Scheduler
from tokenspeed_rl.errors import EngineStateError, WeightsInvalidError
from tokenspeed_rl.lifecycle.admission import Admission
from tokenspeed_rl.lifecycle.reply import answer
from tokenspeed_rl.lifecycle.residency import Part, Residency
from tokenspeed_rl.lifecycle.update_slot import UpdateSlot
from tokenspeed_rl.weights.version import WeightVersion


class LifeCycle:
    """Whether the loop may step, and every call that changes it."""

    def __init__(
        self,
        scheduler: Scheduler,
        cache: PrefixCache,
        version: WeightVersion,
        parts: Mapping[str, Part],
        *,
        end_all: Callable[[], None],
        fit: Callable[[Sequence[Request] | None], None],
        check_shared: Callable[[], None],
        take_submitted: Callable[[], None],
        come_to_rest: Callable[[], None],
        lock: threading.RLock,
    ) -> None:
        """`end_all` ends every unfinished request; `fit` ends or shortens those of some requests (None: all)
        that the KV cache can't hold; `check_shared` raises where a shared module's weights have moved;
        `take_submitted` enqueues what was submitted; `lock` is the one under which that is done."""
        self.version = version
        self.slot = UpdateSlot()
        self.residency = Residency(parts)
        self.admission: Admission[Request] = Admission(
            end_all=end_all,
            retract_all=scheduler.retract_all,
            enqueue=self._enqueue,
            come_to_rest=come_to_rest,
        )
        self._scheduler = scheduler
        self._cache = cache
        self._fit = fit
        self._check_shared = check_shared
        self._take_submitted = take_submitted
        self._come_to_rest = come_to_rest
        self._lock = lock

    # What the loop asks

    @property
    def can_step(self) -> bool:
        """Whether a step may be taken now."""
        return self._runnable and self.admission.steps and not self.slot.writing

    def enqueue(self, requests: Sequence[Request]) -> None:
        """New requests: into the queue, or held back while older ones drain."""
        self._fit(requests)  # a wake may have come since they were measured
        if not self.admission.hold(requests):
            self._enqueue(requests)

    def settle(self) -> None:
        """Answer a drain that has come to its end."""
        self.admission.settle()

    # What submitters ask

    def require_runnable(self) -> None:
        """Raise what would keep a new request waiting now: EngineStateError asleep, paused or about to sleep,
        WeightsInvalidError. From any thread."""
        self.residency.require()
        self.version.require_valid()
        if (mode := self.admission.mode) is not None:
            raise EngineStateError(
                f"the engine is paused ({mode})", fix="Call resume() first, or pass wait=True."
            )
        self.admission.refuse_while_draining("generate")

    def check_shared(self) -> None:
        """Raise WeightsInvalidError where a shared module's weights have moved; of sleeping ones their wake
        will. From any thread."""
        if "weights" not in self.residency.released:
            self._check_shared()

    def require_readable(self) -> None:
        """Raise where the weights can't be read: EngineStateError asleep or half written,
        WeightsInvalidError. From any thread."""
        self.residency.require("weights")
        self.slot.refuse_while_writing()
        self.version.require_valid()

    # Calls, on the loop's thread

    def pause(self, mode: str, reply: Future[bool]) -> None:
        """As `Admission.pause`."""
        with self._lock:  # a request is either there before, or finds the engine paused
            self._take_submitted()
            self.admission.pause(mode, reply, busy=lambda: self._busy)

    def resume(self, mode: str | None = None) -> bool:
        """As `Admission.resume`. Requests then run only on the weights that were shared."""
        with suppress(WeightsInvalidError):  # the version knows, and nothing runs
            self.check_shared()
        self.admission.resume(mode)
        return True

    def release(self, tags: str | Sequence[str] | None, reply: Future[None]) -> None:
        """Release tags; on a running engine, once what runs has ended.

        Raises:
            RequestError, EngineStateError: nothing changed.
        """
        self.admission.refuse_while_draining("release")
        self.slot.refuse("release")
        names = self.residency.to_release(tags)

        def now() -> None:
            self._come_to_rest()
            self.residency.release(names)

        if not names or self.admission.mode is not None:
            answer(reply, now)
            return
        with self._lock:  # as for a pause
            self._take_submitted()
            self.admission.drain(
                f"a release of {', '.join(names)}", now, reply, busy=lambda: self.slot.taken or self._busy
            )

    def wake(self, tags: str | Sequence[str] | None) -> None:
        """Take back tags, all or none.

        Raises:
            RequestError, EngineStateError, OutOfMemoryError, WeightsInvalidError: nothing changed, but that
                the weights are known to be invalid.
        """
        self.slot.refuse("resume_memory_occupation")
        names = self.residency.to_resume(tags)
        if names and "weights" not in self.residency.released - set(names):
            self._check_shared()
        self.residency.resume(names)
        self._fit(None)

    def weights_committed(self, *, flush: bool) -> None:
        """The weights are others: what is in flight re-prefills, or under a pause that keeps goes on with
        its KV; nobody else reads KV computed before."""
        if self.admission.frozen:
            self._scheduler.freeze()
        else:
            self._scheduler.retract_all()
        if flush:
            self._cache.flush()
        else:
            self._cache.new_epoch()

    @property
    def _runnable(self) -> bool:
        return self.version.valid and not self.residency.asleep

    @property
    def _busy(self) -> bool:
        """Whether a request is left that can run, now or when an update that is going on has ended."""
        return self._scheduler.has_work and (self._runnable or self.slot.taken)

    def _enqueue(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if not request.finished:
                self._scheduler.add(request)
