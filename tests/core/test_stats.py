"""Counters of the loop."""

from collections.abc import Callable

from tokenspeed_rl.core.batch import Chunk, StepPlan
from tokenspeed_rl.core.request import Request
from tokenspeed_rl.core.stats import Stats


def test_totals_and_rate(new_request: Callable[..., Request]) -> None:
    """Steps, computed prompt tokens and drawn tokens add up; nothing is divided by no time at all."""
    stats = Stats()
    assert stats.snapshot()["tokens_per_second"] == 0.0 and stats.last_output == 0.0
    first, second = new_request([1, 2, 3]), new_request([4, 5])
    stats.count_step(StepPlan(chunks=[Chunk(first, 0, 2)]), 0, 0.5)
    assert stats.last_output == 0.0, "a step that draws nothing is no output"
    stats.count_step(StepPlan(chunks=[Chunk(first, 2, 1), Chunk(second, 0, 2)]), 2, 0.25)
    stats.count_step(StepPlan(decodes=[first, second]), 2, 0.25)
    assert stats.snapshot() == {
        "steps": 3,
        "prefill_tokens": 5,
        "output_tokens": 4,
        "step_seconds": 1.0,
        "tokens_per_second": 4.0,
    }
    assert stats.last_output > 0.0
