"""What reads its prompt, to the scheduler, the intake and the output: plain Python, no tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tokenspeed_rl.cache.page_pool import PagePool
from tokenspeed_rl.cache.prefix_cache import PrefixCache
from tokenspeed_rl.core.batch import StepPlan
from tokenspeed_rl.core.intake import Intake
from tokenspeed_rl.core.model_runner import StepOutcome
from tokenspeed_rl.core.outcome import (
    reason_to_end_reading,
    take_prompt_logprobs,
    take_readings,
    take_routes,
)
from tokenspeed_rl.core.output import result
from tokenspeed_rl.core.request import Request, Status, Wants
from tokenspeed_rl.core.scheduler import Scheduler
from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.requests import EmbeddingReqInput, GenerateReqInput

NewRequest = Callable[..., Request]


def scheduler(budget: int = 64, pages: int = 32) -> Scheduler:
    return Scheduler(PrefixCache(PagePool(pages), 4), max_running=8, prefill_budget=budget)


def reader(new_request: NewRequest, prompt: list[int], reading: str = "score", **fields: Any) -> Request:
    return new_request(prompt, wants=Wants(reading=reading, labels=1), max_new_tokens=0, **fields)


def step(made: Scheduler) -> StepPlan:
    """One step in which every reader whose prompt is complete ends."""
    plan = made.schedule()
    made.advance(plan)
    for request in plan.readers:
        made.remove(request)
    return plan


def intake(reading: str = "score", labels: int = 1, pad: int | None = None) -> Intake:
    return Intake.create(
        vocab_size=12,
        context=16,
        eos_ids=(),
        tokenizer=None,
        seed=0,
        reading=reading,
        labels=labels,
        pad_id=lambda: pad,
    )


def prepare(made: Intake, ids: Any) -> list[Request]:
    return made.prepare(EmbeddingReqInput(input_ids=ids), capacity=16, publish=lambda request: None)


@pytest.mark.parametrize(("reading", "found"), [("embedding", 8), ("score", 8), ("values", 0)])
def test_what_comes_out_of_the_cache(new_request: NewRequest, reading: str, found: int) -> None:
    """All but the token read, and for values nothing, nor do they put anything in."""
    made = scheduler()
    for expected in (0, found):
        made.add(reader(new_request, list(range(10)), reading))
        (chunk,) = step(made).chunks
        assert chunk.start == expected and chunk.completes
    assert made.cache.num_cached == (0 if reading == "values" else 2)
    assert made.cache.num_available == 32


def test_a_change_of_the_weights_under_keep_sends_readers_back(new_request: NewRequest) -> None:
    """Those that generate freeze; those that read start over, leaders and followers, and lose what was
    read."""
    made = scheduler(budget=12)
    readers = [reader(new_request, list(range(20)), "values", arrival=at) for at in (1, 2)]
    generating = new_request([7, 8], arrival=0)
    for request in (generating, *readers):
        made.add(request)
    made.advance(made.schedule())
    generating.record(9, "old")
    assert made.running == [generating, *readers] and readers[1].leader is readers[0]
    readers[0].readings = [[1.0]]
    made.freeze()
    assert made.running == [generating] and generating.mixed
    for request in readers:
        assert request.status is Status.WAITING and not request.pages and not request.readings
    assert len(step(made).chunks) == 1 and readers[1].leader is readers[0]


def test_what_borrowed_is_not_trusted_once(new_request: NewRequest) -> None:
    """F7: a fault in borrowed KV sends a request back, to compute all itself and lend nothing; its own ends
    it."""
    made, prompt = scheduler(), list(range(9))
    made.add(reader(new_request, prompt))
    step(made)
    request = reader(new_request, prompt)
    made.add(request)
    made.advance(made.schedule())
    assert request.borrowed and made.distrust(request)
    assert request.status is Status.WAITING and request.pages == []
    plan = made.schedule()
    assert [(chunk.request, chunk.start) for chunk in plan.chunks] == [(request, 0)]
    assert made.cache.num_cached == 0
    assert not request.borrowed and not made.distrust(request)
    assert request.status is Status.RUNNING


def test_pages_of_others_are_spared(new_request: NewRequest) -> None:
    """F7: who computes a prompt from its beginning beside another that begins alike takes that one's full
    pages, and writes to none of them."""
    made = scheduler()
    first = new_request([1, 2, 3, 4, 5, 6, 7, 8, 9], arrival=0)
    second = new_request([1, 2, 3, 4, 5, 6, 7, 8, 0], arrival=1, wants=Wants(prompt_start=0))
    made.add(first)
    made.add(second)
    plan = made.schedule()
    assert [chunk.start for chunk in plan.chunks] == [0, 0]
    assert (first.spared, second.spared) == ([], [0, 1]) and second.pages[:2] == first.pages[:2]
    made.advance(plan)
    for request in (first, second):
        request.record(3, "v")
    made.schedule()
    assert second.spared == []


@pytest.mark.parametrize(
    ("ids", "kept"), [([3, 5], 2), ([3, 0], 1), ([0, 3, 0, 0], 2), ([0, 0], 1), ([3] + [0] * 40, 1)]
)
def test_pads_behind_a_sequence(ids: list[int], kept: int) -> None:
    """They aren't computed, so need no room, and count as given."""
    (request,) = prepare(intake(pad=0), ids)
    assert request.tokens == ids[:kept] and request.wants.padding == len(ids) - kept
    assert request.max_new_tokens == 0
    assert result(request, None)["meta_info"]["prompt_tokens"] == len(ids)
    for other in (intake(pad=None), intake("values", pad=0), intake("embedding", labels=0, pad=0)):
        if len(ids) <= 16:
            assert prepare(other, ids)[0].tokens == ids
        else:
            with pytest.raises(RequestError, match="41 tokens"):
                prepare(other, ids)


def test_only_a_language_model_generates() -> None:
    """Contract 3: a model that scores takes no GenerateReqInput."""
    obj = GenerateReqInput(input_ids=[1])
    with pytest.raises(RequestError, match="doesn't generate"):
        intake().prepare(obj, capacity=16, publish=lambda request: None)
    (request,) = intake("embedding", 0).prepare(obj, capacity=16, publish=lambda request: None)
    assert request.wants.reading is None


@pytest.mark.parametrize(
    ("reading", "labels", "rows", "shown"),
    [
        ("embedding", 0, [[0.6, 0.8]], {"embedding": [0.6, 0.8]}),
        ("embedding", 0, [], {"embedding": []}),
        ("score", 1, [[2.0]], {"score": 2.0}),
        ("score", 2, [[2.0, 3.0]], {"score": [2.0, 3.0]}),
        ("score", 2, [], {"score": None}),
        ("values", 1, [[2.0], [3.0]], {"score": [2.0, 3.0]}),
        ("values", 2, [[2.0, 1.0]], {"score": [[2.0, 1.0]]}),
        ("values", 1, [], {"score": []}),
    ],
)
def test_shapes(new_request: NewRequest, reading: str, labels: int, rows: Any, shown: Any) -> None:
    """One label is a number, more are a list; values are a list of those; what is aborted has every field."""
    request = new_request([1, 2], wants=Wants(reading=reading, labels=labels), readings=rows)
    found = result(request, None)
    meta = found.pop("meta_info")
    assert found == shown and meta["completion_tokens"] == 0 and meta["prompt_tokens"] == 2


def test_taking_readings(new_request: NewRequest) -> None:
    """A fork has all of its leader's values, also if that one was aborted while the step ran, which then has
    what it had; what is no number ends a reading as abort, with nothing read."""
    leader, fork = (reader(new_request, [1, 2, 3], "values") for _ in range(2))
    leader.readings, leader.finish_reason = [[1.0]], {"type": "abort", "message": "aborted"}
    outcome = StepOutcome([], [], {}, [(leader, [[2.0], [3.0]])])
    take_readings(outcome, {fork: leader})
    assert leader.readings == [[1.0]] and fork.readings == [[1.0], [2.0], [3.0]]
    assert reason_to_end_reading(fork) == {"type": "length", "length": 0}
    fork.readings[1] = [math.nan]
    assert reason_to_end_reading(fork)["type"] == "abort" and fork.readings == []


def test_the_final_result_of_an_aborted_request_stays(new_request: NewRequest) -> None:
    """Aborted while the step ran, it gets neither the step's prompt logprobs nor its routes; its fork gets
    both."""
    wants = Wants(logprob=True, prompt_start=0, routed_experts=True)
    leader, fork = (new_request([1, 2, 3], wants=wants) for _ in range(2))
    route = np.zeros((1, 1), dtype=np.int16)
    leader.prompt_logprobs, leader.routes = [-1.0], [route]
    leader.finish_reason = {"type": "abort", "message": "aborted"}
    outcome = StepOutcome([], [(leader, [-2.0])], {}, [], routes=[(leader, [route, route])])
    take_prompt_logprobs(outcome, {fork: leader})
    take_routes(outcome, {fork: leader})
    assert leader.prompt_logprobs == [-1.0] and len(leader.routes) == 1
    assert fork.prompt_logprobs == [-1.0, -2.0] and len(fork.routes) == 3
