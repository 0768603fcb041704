"""Counters of the loop."""

from collections.abc import Callable

from tokenspeed_rl.core.batch import Chunk, StepPlan
from tokenspeed_rl.core.request import ABANDONED, Request
from tokenspeed_rl.core.stats import RECENT_SECONDS, Ends, Stats


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
        "recent": {"step_seconds": 1.0, "prefill_tokens_per_second": 5.0, "tokens_per_second": 4.0},
    }
    assert stats.last_output > 0.0


def test_the_recent_past_is_the_last_ten_seconds_of_stepping(new_request: Callable[..., Request]) -> None:
    """However long the engine ran: 1 token a second for a thousand seconds, then 5 a second for eleven."""
    stats, plan = Stats(), StepPlan(decodes=[new_request([1, 2])])
    for drawn, seconds in ((1, 1000), (5, 11)):
        for _ in range(seconds * 4):
            stats.count_step(plan, drawn, 0.25)
    recent = stats.snapshot()["recent"]
    assert recent["tokens_per_second"] == 20.0 and stats.snapshot()["tokens_per_second"] < 4.5
    assert RECENT_SECONDS - 1 <= recent["step_seconds"] <= RECENT_SECONDS
    assert recent["prefill_tokens_per_second"] == 0.0


def test_how_samples_ended(new_request: Callable[..., Request]) -> None:
    """Finished, aborted and abandoned ones are told apart; the hit rate is over those that were admitted."""
    ends = Ends()
    assert ends.snapshot()["cache_hit_rate"] == 0.0
    reasons = [
        ({"type": "stop", "matched": 1}, 16),
        ({"type": "length", "length": 3}, 0),
        ({"type": "abort", "message": "aborted"}, 4),
        ({"type": "abort", "message": ABANDONED[0]}, None),
        ({"type": "abort", "message": ABANDONED[1]}, None),
    ]
    for reason, cached in reasons:
        request = new_request(list(range(20)))
        request.finish_reason, request.cached_tokens = reason, cached
        ends.count(request)
    assert ends.snapshot() == {
        "num_finished": 2,
        "num_aborted": 1,
        "num_abandoned": 2,
        "prompt_tokens": 60,
        "cached_tokens": 20,
        "cache_hit_rate": 1 / 3,
    }
