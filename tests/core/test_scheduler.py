"""The scheduler under random requests and disturbances, and its promises one by one."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.calls import calls_of
from tokenspeed_rl.core.batch import StepPlan
from tokenspeed_rl.core.request import Request, Status

BROKEN = 99
"""A prompt with this token has logits that are not finite."""
beginnings = st.sampled_from([(), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7), (1, 2, 9, 9)])
prompts = st.builds(
    lambda start, rest: (*start, *rest), beginnings, st.lists(st.integers(1, 3), min_size=1, max_size=6)
)
added = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "n": st.sampled_from([1, 1, 2, 4]),
        "max_new": st.integers(0, 9),
        "priority": st.sampled_from([0, 0, 0, 1, 2]),
        "prompt_start": st.sampled_from([-1, -1, 0, 1, 5]),
        "broken": st.sampled_from([False] * 7 + [True]),
        "lora": st.sampled_from([None, None, "a", "b"]),
    }
)
disturbances = st.one_of(
    added.map(lambda fields: ("add", fields)),
    st.tuples(st.sampled_from(["abort", "abort_in_step", "retract"]), st.integers(0, 40)),
    st.tuples(st.sampled_from(["step", "step", "step", "retract_all", "change_weights"]), st.just(0)),
)
shapes = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 2, 3, 4]),
        "pages": st.sampled_from([0, 1, 3, 8, 30]),
        "max_running": st.sampled_from([1, 2, 5, 16]),
        "budget": st.sampled_from([1, 2, 5, 64]),
        "caching": st.sampled_from([True, True, False]),
    }
)


def add(sim: Any, prompt: tuple[int, ...], prompt_start: int, broken: bool, **fields: Any) -> None:
    tokens = (*prompt, BROKEN) if broken else prompt
    sim.add(tokens, prompt_start=min(prompt_start, len(tokens) - 1), **fields)


def disturb(sim: Any, name: str, argument: Any) -> None:
    live: list[Request] = sim.live
    if name == "add":
        add(sim, **argument)
    elif name == "abort" and live:
        sim.abort(live[argument % len(live)])
    elif name == "abort_in_step":
        sim.step(abort=lambda live: live[argument % 7 :: 7])
    elif name == "retract" and (running := sim.scheduler.running):
        sim.retract(running[argument % len(running)])
    elif name == "retract_all":
        sim.scheduler.retract_all()
    elif name == "change_weights":
        sim.change_weights()
    elif name == "step":
        sim.step()
    sim.check_pages()


@settings(max_examples=400)
@given(shape=shapes, events=st.lists(disturbances, min_size=5, max_size=40))
def test_any_course_of_events(
    simulation: Callable[..., Any], shape: dict[str, Any], events: list[tuple[str, Any]]
) -> None:
    """C2, C3, C9, D1, F7, F9, H13: whatever comes, goes and is retracted, every token is drawn from its own
    full context under the present weights and its adapter, every request ends with the tokens it would have
    got alone, and every page returns."""
    # Just enough pages for the longest request, and a few more: most courses retract.
    longest = 13 + 1 + 9
    pages = -(-longest // shape["page_size"]) + shape["pages"]
    sim = simulation(**{**shape, "pages": pages}, stops=True)
    for name, argument in events:
        disturb(sim, name, argument)
    sim.drain()


def test_higher_priority_first_and_ties_in_order_of_arrival(simulation: Callable[..., Any]) -> None:
    """The queue is FIFO within a priority, for retracted requests too."""
    sim = simulation(pages=40, max_running=1)
    for number, priority in enumerate([0, 2, 1, 2, 0]):
        sim.add([1, 2, number + 3], max_new=1, priority=priority)
    sim.drain()
    assert [request.arrival for request in sim.ended] == [1, 3, 2, 0, 4]

    for number in range(3):
        sim.add([1, 2, number + 3], max_new=2)
    sim.step()
    sim.scheduler.retract_all()
    sim.drain()
    assert [request.arrival for request in sim.ended[5:]] == [5, 6, 7]


def test_priority_never_preempts(simulation: Callable[..., Any]) -> None:
    """A running request keeps its place, whoever comes."""
    sim = simulation(pages=40, max_running=1)
    [low] = sim.add([1, 2, 4], max_new=5)
    sim.step()
    sim.add([1, 2, 5], priority=9)
    assert sim.scheduler.running == [low]
    while not low.finished:
        sim.step()
        assert low.finished or sim.scheduler.running == [low]
    sim.drain()


def test_the_youngest_is_retracted_and_nothing_sampled_is_lost(simulation: Callable[..., Any]) -> None:
    """C3, C10: without pages for all, the older goes on, and the younger later goes on from its tokens."""
    sim = simulation(pages=8, page_size=2, caching=False)
    old, young = (sim.add([1, 2, number], max_new=9)[0] for number in (8, 9))
    kept: list[int] = []
    while not sim.retracted:
        kept = young.output_ids
        sim.step()
    assert sim.retracted == [young] and sim.scheduler.num_retractions == 1
    assert (young.status, young.pages, young.computed) == (Status.WAITING, [], 0)
    assert young.output_ids == kept != []
    sim.drain()
    assert young.output_ids[: len(kept)] == kept and old not in sim.retracted


def test_freed_pages_are_for_those_who_needed_them(simulation: Callable[..., Any]) -> None:
    """C3: in the step that retracts a request for want of pages nobody is let in, not even with priority."""
    sim = simulation(pages=9, page_size=2, max_running=2, budget=4, caching=False)
    [old], [big] = sim.add([1, 2, 3], max_new=9), sim.add(range(1, 12), max_new=2)
    sim.step()
    [late] = sim.add([4], max_new=2, priority=1)
    for _ in range(4):
        sim.step()
    assert sim.retracted == [big] and sim.scheduler.running == [old]
    sim.step()
    assert sim.scheduler.running == [old, late]
    sim.drain()


def test_a_page_for_every_running_request_stays_in_reserve(simulation: Callable[..., Any]) -> None:
    """Nobody is let in whose pages a running request would soon take away again."""
    sim = simulation(pages=8, page_size=2, caching=False)
    [first], [second] = sim.add([1, 2, 3], max_new=2), sim.add(range(1, 12), max_new=2)
    while not first.finished:
        sim.step()
        assert second.status is Status.WAITING, "six pages were free, of which one was spoken for"
    sim.drain()
    assert not sim.retracted


@pytest.mark.parametrize("page_size", [1, 3])
def test_three_times_the_capacity_drains(simulation: Callable[..., Any], page_size: int) -> None:
    """C3: a tiny cache serves a long queue, retracting as it goes, in no more steps than there are tokens."""
    sim = simulation(pages=36 // page_size, page_size=page_size, max_running=16, budget=5)
    requests = [r for k in range(6) for r in sim.add([1, 2, 3 + k, 4], n=2, max_new=14, priority=k % 2)]
    tokens = sum(request.prompt_len + request.max_new_tokens for request in requests)
    assert tokens >= 3 * sim.capacity
    sim.step()
    sim.change_weights()
    sim.drain(max_steps=tokens)
    assert sim.retracted


def test_prompts_are_cut_to_the_budget(simulation: Callable[..., Any]) -> None:
    """A step computes at most the budget of prompt tokens, of those begun first, and decodes whatever can."""
    sim = simulation(pages=60, budget=4)
    [running] = sim.add([1, 2, 3], max_new=9)
    sim.step()
    long, short = sim.add([7, 2, 3, 4, 5, 6], max_new=2)[0], sim.add([5, 5, 5], max_new=2)[0]
    seen = []
    for _ in range(3):
        plan = sim.step()
        assert plan.decodes[0] is running
        seen.append([(chunk.request, chunk.start, chunk.count) for chunk in plan.chunks])
    assert seen == [[(long, 0, 4)], [(long, 4, 2), (short, 0, 2)], [(short, 2, 1)]]


class Arrival(int):
    """An arrival number whose comparisons are calls that a profiler sees."""

    def __lt__(self, other: int) -> bool:
        return int(self) < int(other)


def schedule_calls(simulation: Callable[..., Any], queued: int) -> int:
    """Calls made by ten `schedule()`s with `queued` requests, comparisons of arrivals included."""
    sim = simulation(pages=80, budget=64, arrival=Arrival)
    for number in range(queued):
        sim.add([1, 2, number], max_new=2)
    calls = 0
    for _ in range(10):
        plans: list[StepPlan] = []
        calls += calls_of(lambda found=plans: found.append(sim.scheduler.schedule()))
        plan = plans[0]
        sim.scheduler.advance(plan)
        for request in [*plan.decodes, *(chunk.request for chunk in plan.chunks)]:
            request.record(1, "")
            if request.output_len == 2:
                sim.scheduler.remove(request)
    return calls


def test_a_long_queue_costs_a_step_next_to_nothing(simulation: Callable[..., Any]) -> None:
    """100,000 waiting requests don't slow down those that run: a step's work grows by a logarithm at most."""
    short, long = (schedule_calls(simulation, queued) for queued in (100, 100_000))
    assert short > 500 and long < 2 * short
