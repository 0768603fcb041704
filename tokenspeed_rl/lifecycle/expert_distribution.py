"""How the tokens spread over a model's experts: counting switched on and off, and the counts taken away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenspeed_rl.errors import EngineStateError

KEPT_STEPS = 100
"""Steps whose own counts a record keeps: the last ones. Its totals are of all."""
Counts = npt.NDArray[np.int64]
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Counted:
    """What was counted so far. Replaced whole by each step, so that any thread may read it."""

    total: Counts
    steps: int = 0
    tokens: int = 0
    last: tuple[tuple[int, int, Counts], ...] = ()
    """(number, tokens, counts) of the last steps."""


class ExpertDistribution:
    """The record: it grows while recording is on, also across a stop and another start, until it is dumped.

    Changed by the loop's thread between two steps; `recording` and `snapshot` are for any thread.
    """

    def __init__(
        self,
        layers: Sequence[int],
        num_experts: int,
        per_token: int,
        write: Callable[[Record], str] | None = None,
    ) -> None:
        """`layers` are those with experts, none for a model without. `write` puts a record into a file and
        returns its path, or raises OSError; None: a dump is only kept here."""
        self.recording = False
        self._layers = tuple(layers)
        self._shape = {"num_experts": num_experts, "experts_per_token": per_token}
        self._write = write
        self._nothing = _Counted(np.zeros((len(layers), num_experts), dtype=np.int64))
        self._counted = self._nothing
        self._last_dump: dict[str, Any] | None = None

    def start(self) -> None:
        """Count from the next step on. Raises EngineStateError: no experts, or it is on."""
        self._require_experts()
        if self.recording:
            raise EngineStateError(
                "expert distribution is being recorded already",
                fix="There is nothing to do; to begin anew, dump_expert_distribution_record(), or "
                "stop_expert_distribution_record() first.",
            )
        self.recording = True

    def stop(self) -> None:
        """Count no more; what was counted stays. Raises EngineStateError: no experts, or it is off."""
        self._require_experts()
        if not self.recording:
            raise EngineStateError(
                "expert distribution is not being recorded",
                fix="Call start_expert_distribution_record() first.",
            )
        self.recording = False

    def dump(self) -> None:
        """Take the record away, into a file if there is where, and begin another; recording goes on or not.

        Raises:
            EngineStateError: no experts, no step was counted, or the file can't be written. The record stays.
        """
        self._require_experts()
        if not self._counted.steps:
            raise EngineStateError(
                "no step was recorded since the last dump of expert distribution",
                got="recording" if self.recording else "not recording",
                fix="Generate first."
                if self.recording
                else "Call start_expert_distribution_record(), then generate.",
            )
        record = self._record()
        try:
            path = None if self._write is None else self._write(record)
        except OSError as error:
            raise EngineStateError(
                f"the record of expert distribution could not be written: {error}",
                fix="Make room in expert_distribution_dir, or make it writable, and dump again.",
            ) from error
        self._last_dump = {"path": path, "record": record}
        self._counted = self._nothing

    def add(self, tokens: int, counts: Counts) -> None:
        """One step's counts [layers with experts, experts], of so many tokens."""
        old = self._counted
        self._counted = replace(
            old,
            total=old.total + counts,
            steps=old.steps + 1,
            tokens=old.tokens + tokens,
            last=(*old.last, (old.steps, tokens, counts))[-KEPT_STEPS:],
        )

    def snapshot(self) -> dict[str, Any] | None:
        """``recording``, the ``record`` so far, and the ``last_dump`` (its ``path`` and ``record``; None
        before); None for a model without experts."""
        if not self._layers:
            return None
        return {"recording": self.recording, "record": self._record(), "last_dump": self._last_dump}

    def _record(self) -> Record:
        counted = self._counted
        return {
            "layers": list(self._layers),
            **self._shape,
            "steps": counted.steps,
            "tokens": counted.tokens,
            "counts": counted.total.tolist(),
            "last_steps": [
                {"step": number, "tokens": tokens, "counts": counts.tolist()}
                for number, tokens, counts in counted.last
            ],
        }

    def _require_experts(self) -> None:
        if not self._layers:
            raise EngineStateError(
                "this model has no experts whose distribution could be recorded",
                fix="Record that of a mixture of experts, such as Qwen3-MoE or Mixtral.",
            )
