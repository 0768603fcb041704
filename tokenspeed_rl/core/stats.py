"""Counters of the loop, written by its thread and read by any."""

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tokenspeed_rl.core.batch import StepPlan
from tokenspeed_rl.core.request import ABANDONED, Request

RECENT_SECONDS = 10.0
_SLICES = 10
"""Into which the recent past is cut; the oldest goes as a whole."""


class Slice(NamedTuple):
    """Some steps in a row."""

    seconds: float = 0.0
    prefill_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class Stats:
    """Totals since the engine was made."""

    steps: int = 0
    prefill_tokens: int = 0
    """Tokens computed in chunks, those of retracted requests again; what the prefix cache or a shared prompt
    saved is not in it."""
    output_tokens: int = 0
    step_seconds: float = 0.0
    """Time spent in steps, scheduling and sampling included."""
    last_output: float = field(default=0.0)
    """Epoch seconds of the last drawn token, or the last reading."""
    _recent: tuple[Slice, ...] = (Slice(),)

    def count_step(self, plan: StepPlan, drawn: int, seconds: float, *, read: int = 0) -> None:
        """Add one step, in which `drawn` tokens came, and something was read for `read` requests."""
        chunks = sum(chunk.count for chunk in plan.chunks)
        self.steps += 1
        self.prefill_tokens += chunks
        self.output_tokens += drawn
        self.step_seconds += seconds
        if drawn or read:
            self.last_output = time.time()
        last = self._recent[-1]
        if last.seconds >= RECENT_SECONDS / _SLICES:
            self._recent, last = (*self._recent[1 - _SLICES :], Slice()), Slice()
        grown = Slice(last.seconds + seconds, last.prefill_tokens + chunks, last.output_tokens + drawn)
        self._recent = (*self._recent[:-1], grown)

    def snapshot(self) -> dict[str, Any]:
        """The totals, and tokens per second of stepping: of all of it, and of the last ten seconds of it (and
        the step in which they began)."""
        recent = self._recent
        seconds = sum(each.seconds for each in recent)
        return {
            "steps": self.steps,
            "prefill_tokens": self.prefill_tokens,
            "output_tokens": self.output_tokens,
            "step_seconds": self.step_seconds,
            "tokens_per_second": _rate(self.output_tokens, self.step_seconds),
            "recent": {
                "step_seconds": seconds,
                "prefill_tokens_per_second": _rate(sum(each.prefill_tokens for each in recent), seconds),
                "tokens_per_second": _rate(sum(each.output_tokens for each in recent), seconds),
            },
        }


@dataclass(slots=True)
class Ends:
    """How samples ended, and what the prefix cache saved them."""

    finished: int = 0
    """By a stop or by their length."""
    aborted: int = 0
    """By an abort, a pause, or what went wrong with them."""
    abandoned: int = 0
    """By a caller who no longer listens."""
    prompt_tokens: int = 0
    """Of those that were admitted."""
    cached_tokens: int = 0
    """Of these, what wasn't computed for them."""

    def count(self, request: Request) -> None:
        """Add one that ended. Under the loop's lock."""
        reason = request.finish_reason or {}
        if reason.get("type") != "abort":
            self.finished += 1
        elif reason["message"] in ABANDONED:
            self.abandoned += 1
        else:
            self.aborted += 1
        if request.cached_tokens is not None:
            self.prompt_tokens += request.prompt_len
            self.cached_tokens += request.cached_tokens

    def snapshot(self) -> dict[str, Any]:
        """The counts, and the share of prompt tokens that were there already."""
        return {
            "num_finished": self.finished,
            "num_aborted": self.aborted,
            "num_abandoned": self.abandoned,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "cache_hit_rate": _rate(self.cached_tokens, self.prompt_tokens),
        }


def _rate(count: int, per: float) -> float:
    return count / per if per else 0.0
