"""Profiles of the engine's steps: what is asked for, and the observer that has it recorded."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, record_function, supported_activities

from tokenspeed_rl.core.batch import StepPlan
from tokenspeed_rl.core.model_runner import StepOutcome
from tokenspeed_rl.core.watching.profile_recorder import TorchRecorder, refuse_beside_another
from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.lifecycle.profiling import Plan, Profiling
from tokenspeed_rl.sampling_params import check_bool, check_integer

ACTIVITIES = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA, "CUDA": ProfilerActivity.CUDA}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """A profile that was asked for, checked."""

    folder: Path
    plan: Plan
    activities: tuple[ProfilerActivity, ...]
    with_stack: bool
    record_shapes: bool


def profile_request(
    output_dir: str | None,
    start_step: int | None,
    num_steps: int | None,
    activities: Sequence[str] | str | None,
    with_stack: bool | None,
    record_shapes: bool | None,
    profile_by_stage: bool,
) -> ProfileRequest:
    """As `EngineClient.start_profile` takes them; makes the folder.

    Raises:
        RequestError: what, got, fix. Nothing was made but, perhaps, the folder.
    """
    for name, value in (("with_stack", with_stack), ("record_shapes", record_shapes)):
        if value is not None:
            check_bool(name, value)
    check_bool("profile_by_stage", profile_by_stage)
    plan = Plan(
        start_step=None if start_step is None else check_integer("start_step", start_step, low=0),
        num_steps=None if num_steps is None else check_integer("num_steps", num_steps, low=1),
        by_stage=profile_by_stage,
    )
    return ProfileRequest(
        plan=plan,
        activities=_activities(activities),
        with_stack=bool(with_stack),
        record_shapes=bool(record_shapes),
        folder=_folder(output_dir),
    )


class Profiler:
    """Observes every step; off, it costs a look at one attribute. Called on the loop's thread."""

    def __init__(self, steps: Callable[[], int]) -> None:
        """`steps` were taken so far."""
        self.profiling = Profiling()
        self._steps = steps
        self._mark: Any = None

    def start(self, asked: ProfileRequest) -> dict[str, Any]:
        """Begin a profile; returns what it will be.

        Raises:
            EngineStateError: one is going on, here or elsewhere in this process. RequestError: its first step
                is over. Nothing changed.
        """
        recorder = TorchRecorder(
            asked.folder,
            asked.activities,
            with_stack=asked.with_stack,
            record_shapes=asked.record_shapes,
        )
        if not self.profiling.active:
            refuse_beside_another()
        self.profiling.start(asked.plan, recorder, self._steps())
        first = asked.plan.start_step
        return {
            "output_dir": str(asked.folder),
            "start_step": self._steps() if first is None else first,
            "num_steps": asked.plan.num_steps,
            "activities": ["CPU" if each is ProfilerActivity.CPU else "GPU" for each in asked.activities],
            "profile_by_stage": asked.plan.by_stage,
        }

    def stop(self) -> list[str]:
        """As `Profiling.stop`."""
        return self.profiling.stop()

    def close(self) -> None:
        """The loop ends: write what there is, or leave nothing."""
        self._unmark()
        if self.profiling.active:
            with suppress(Exception):
                self.profiling.stop()

    def begins(self, plan: StepPlan) -> None:
        """As `StepObserver`."""
        if self.profiling.active:
            self.profiling.begins("prefill" if plan.chunks else "decode", self._steps())
            if self.profiling.kind is not None:
                self._mark = record_function(title(plan))
                self._mark.__enter__()

    def ended(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """As `StepObserver`."""
        if self._mark is not None:
            self._unmark()
            self.profiling.ended()

    def _unmark(self) -> None:
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.__exit__(None, None, None)


def title(plan: StepPlan) -> str:
    """What a trace viewer shows of a step: `decode[8]`, `prefill[3 requests, 120 tokens]`, and how many
    others were decoding."""
    if not plan.chunks:
        return f"decode[{len(plan.decodes)}]"
    tokens = sum(chunk.count for chunk in plan.chunks)
    beside = f", {len(plan.decodes)} decoding" if plan.decodes else ""
    return f"prefill[{_counted(len(plan.chunks), 'request')}, {_counted(tokens, 'token')}{beside}]"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _activities(names: Sequence[str] | str | None) -> tuple[ProfilerActivity, ...]:
    here = supported_activities()
    if names is None:
        return tuple(each for each in (ProfilerActivity.CPU, ProfilerActivity.CUDA) if each in here)
    listed = [names] if isinstance(names, str) else names
    if not isinstance(listed, Sequence) or not listed:
        raise RequestError("activities must be a list of names", got=names, fix='Pass ["CPU"] or None.')
    for name in listed:
        if not isinstance(name, str) or name not in ACTIVITIES:
            raise RequestError("this is no activity", got=name, fix='Choose of "CPU" and "GPU".')
        if ACTIVITIES[name] not in here:
            raise RequestError("this activity can't be recorded here", got=name, fix='Pass ["CPU"].')
    return tuple(dict.fromkeys(ACTIVITIES[name] for name in listed))


def _folder(output_dir: str | None) -> Path:
    try:
        folder = Path("profiles" if output_dir is None else output_dir).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, TypeError, ValueError) as error:
        raise RequestError(
            f"output_dir can't be written: {error}", got=output_dir, fix="Name another folder."
        ) from error
    return folder
