"""Counters of the loop, written by its thread and read by any."""

import time
from dataclasses import dataclass, field
from typing import Any

from tokenspeed_rl.core.batch import StepPlan


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

    def count_step(self, plan: StepPlan, drawn: int, seconds: float, *, read: int = 0) -> None:
        """Add one step, in which `drawn` tokens came, and something was read for `read` requests."""
        self.steps += 1
        self.prefill_tokens += sum(chunk.count for chunk in plan.chunks)
        self.output_tokens += drawn
        self.step_seconds += seconds
        if drawn or read:
            self.last_output = time.time()

    def snapshot(self) -> dict[str, Any]:
        """The totals, and tokens per second of stepping."""
        rate = self.output_tokens / self.step_seconds if self.step_seconds else 0.0
        return {
            "steps": self.steps,
            "prefill_tokens": self.prefill_tokens,
            "output_tokens": self.output_tokens,
            "step_seconds": self.step_seconds,
            "tokens_per_second": rate,
        }
