"""Which steps a profile records, and where it stands. What records them is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tokenspeed_rl.errors import EngineStateError, RequestError

STAGES = ("prefill", "decode")
WHOLE = "steps"
"""What a profile that isn't taken by stage records."""


class Recorder(Protocol):
    """Records stretches of steps. What it raises ends the profile, not the engine."""

    def begin(self, kind: str) -> None:
        """Record from here on, as one more stretch of that kind."""

    def finish(self) -> None:
        """The stretch is over."""

    def write(self) -> list[str]:
        """Write one file for each kind that was recorded; returns their paths."""
        ...

    def drop(self) -> None:
        """Something failed: leave nothing behind. Raises nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which steps."""

    start_step: int | None = None
    """The number of steps taken before the first that counts; None: the next one counts."""
    num_steps: int | None = None
    """How many, of each stage where they are told apart; None: until it is stopped."""
    by_stage: bool = False


class Profiling:
    """Idle, waiting for its first step, running, or ended by itself with files that nobody has asked for.

    The loop's thread calls everything; any may read `snapshot`.
    """

    def __init__(self) -> None:
        self.state = "idle"
        self.files: list[str] = []
        """Of the last profile."""
        self.error: str | None = None
        """Why the last profile failed."""
        self.kind: str | None = None
        """What is being recorded now."""
        self._counts: Counter[str] = Counter()
        self._plan = Plan()
        self._recorder: Recorder | None = None

    @property
    def active(self) -> bool:
        """Whether steps matter to it."""
        return self._recorder is not None

    def start(self, plan: Plan, recorder: Recorder, steps: int) -> None:
        """Begin with the step that the plan says; `steps` were taken so far.

        Raises:
            EngineStateError: a profile is going on. RequestError: its first step is over. Nothing changed.
        """
        if self.active:
            raise EngineStateError("a profile is going on already", fix="Call stop_profile() first.")
        if plan.start_step is not None and plan.start_step < steps:
            raise RequestError(
                f"start_step is over: the engine has taken {steps} steps",
                got=plan.start_step,
                fix="Leave it out to begin with the next step.",
            )
        self._plan, self._recorder = plan, recorder
        self._counts = Counter()
        self.files, self.error, self.state = [], None, "waiting"

    def begins(self, stage: str, steps: int) -> None:
        """A step of that stage is about to be taken, after `steps` others."""
        if self.state == "waiting" and (self._plan.start_step is None or steps >= self._plan.start_step):
            self.state = "running"
        if self.state != "running":
            return
        wanted = None if self._is_full(kind := self._kind_of(stage)) else kind
        if wanted != self.kind:
            self._guarded(lambda recorder: self._change(recorder, wanted))

    def ended(self) -> None:
        """That step was taken."""
        if self.kind is None:
            return
        self._counts[self.kind] += 1
        if all(self._is_full(kind) for kind in self._kinds):
            self._end("ended")
        elif self._is_full(self.kind):
            self._guarded(lambda recorder: self._change(recorder, None))

    def stop(self) -> list[str]:
        """End it, and return the paths of its files; also of one that ended by itself, once.

        Raises:
            EngineStateError: there is none, or it has failed.
        """
        if self.state == "idle":
            raise EngineStateError("no profile is going on", fix="Call start_profile() first.")
        self._end("idle")
        self.state = "idle"
        if self.error is not None:
            raise EngineStateError(f"the profile failed: {self.error}", fix="Start another.")
        return list(self.files)

    def snapshot(self) -> dict[str, Any]:
        """Where it stands; JSON-serialisable."""
        counts = dict(self._counts)
        return {"state": self.state, "steps": counts, "files": list(self.files), "error": self.error}

    @property
    def _kinds(self) -> tuple[str, ...]:
        return STAGES if self._plan.by_stage else (WHOLE,)

    def _kind_of(self, stage: str) -> str:
        return stage if self._plan.by_stage else WHOLE

    def _is_full(self, kind: str) -> bool:
        return self._plan.num_steps is not None and self._counts[kind] >= self._plan.num_steps

    def _change(self, recorder: Recorder, kind: str | None) -> None:
        """From one stretch to another, or to none."""
        before, self.kind = self.kind, None
        if before is not None:
            recorder.finish()
        if kind is not None:
            recorder.begin(kind)
        self.kind = kind

    def _end(self, state: str) -> None:
        def write(recorder: Recorder) -> None:
            self._change(recorder, None)
            self.files = recorder.write()

        self._guarded(write)
        self.state, self._recorder = state, None

    def _guarded(self, act: Callable[[Recorder], None]) -> None:
        if self._recorder is None:
            return
        try:
            act(self._recorder)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            self._recorder.drop()
            self.state, self.kind, self._recorder = "ended", None, None
