"""Prompts that several requests have, or begin with: computed once, shared page by page."""

from collections.abc import Callable
from typing import Any

import pytest

from tokenspeed_rl.core.request import Status
from tokenspeed_rl.sampling_params import SamplingParams

BROKEN = 99
"""A prompt with this token has logits that are not finite."""


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [7, 8])
@pytest.mark.parametrize("n", [8, 1])
def test_equal_prompts_in_flight_are_computed_once(
    simulation: Callable[..., Any], n: int, length: int, caching: bool
) -> None:
    """F4: `n` samples of a prompt, and equal prompts sent one by one, also while the first is being computed,
    cost one prefill."""
    sim = simulation(pages=60, page_size=4, budget=3, caching=caching)
    samples = sim.add(range(1, length + 1), n=n, max_new=6)
    if n == 1:
        for _ in range(7):
            samples += sim.add(range(1, length + 1), n=1, max_new=6)
            if len(samples) == 4:
                sim.step()
    first = sim.step()
    while not first.forks:
        first = sim.step()
    assert list(first.forks) == samples[1:] and len(first.copies) == (7 if length % 4 else 0)
    shared = {tuple(sample.pages[: length // 4]) for sample in sim.scheduler.running}
    assert len(shared) == 1, "full pages of the prompt are the same for all"
    sim.drain()
    assert sim.prefilled == length
    assert [sample.cached_tokens for sample in samples] == [0] + 7 * [length]


def test_a_prompt_seen_before_is_not_computed_again(simulation: Callable[..., Any]) -> None:
    """Full pages of a finished prompt and its output are reused; one token at least is always computed."""
    sim = simulation(pages=40, page_size=2, budget=64)
    [first] = sim.add([1, 2, 3, 4], max_new=6)
    sim.drain()
    [again], [longer] = sim.add([1, 2, 3, 4]), sim.add([*first.tokens[:7], 11, 11])
    sim.drain()
    assert (first.cached_tokens, again.cached_tokens, longer.cached_tokens) == (0, 2, 6)


def test_prompt_logprobs_are_computed_from_where_they_are_asked(simulation: Callable[..., Any]) -> None:
    """F9: tokens whose logits are wanted don't come out of the cache, those before them do; nobody who wants
    them is served by a twin that doesn't."""
    sim = simulation(pages=40, page_size=2)
    prompt = [1, 2, 3, 4, 5, 6, 7]
    sim.add(prompt)
    sim.drain()
    whole, late, none = (sim.add(prompt, prompt_start=start)[0] for start in (0, 5, -1))
    sim.drain()
    assert (whole.cached_tokens, late.cached_tokens, none.cached_tokens) == (0, 4, 6)


@pytest.mark.parametrize(("prompt_start", "shared"), [(0, False), (-1, True)])
def test_prompt_logprobs_at_two_temperatures(
    simulation: Callable[..., Any], prompt_start: int, shared: bool
) -> None:
    """F9: they differ, so each request computes its own; without them the prompt is computed once."""
    sim = simulation(pages=40)
    first, second = sim.add([1, 2, 3], n=2, prompt_start=prompt_start)
    second.params = SamplingParams(temperature=0.5).validate()
    assert sim.step().forks == ({second: first} if shared else {})
    sim.drain()


def test_equal_prompts_with_different_adapters(simulation: Callable[..., Any]) -> None:
    """H13: their keys and values differ: none leads, forks or reuses a page for another, now or later."""
    sim = simulation(pages=60, page_size=2)
    by_adapter = {lora: sim.add([1, 2, 3, 4, 5], n=2, lora=lora) for lora in (None, "a", "b")}
    forks = sim.step().forks | sim.step().forks
    assert forks == {second: first for first, second in by_adapter.values()}
    sim.drain()
    assert sim.prefilled == 15
    again = {lora: sim.add([1, 2, 3, 4, 5], lora=lora)[0] for lora in ("b", None, "c")}
    sim.drain()
    assert [request.cached_tokens for request in again.values()] == [4, 4, 0]


def test_prompt_logprobs_from_different_places(simulation: Callable[..., Any]) -> None:
    """F9: a twin that has all it wants, and one token left to compute, serves only those who ask the same."""
    sim = simulation(pages=40, budget=4)
    [whole] = sim.add([1, 2, 3, 4, 5], prompt_start=0)
    sim.step()
    assert not whole.wants_prompt_logprobs and whole.remaining == 1
    [last], [same] = (sim.add([1, 2, 3, 4, 5], prompt_start=start) for start in (4, 0))
    assert sim.step().forks == {same: whole}
    sim.drain()
    assert last.prompt_logprobs == [] and len(same.prompt_logprobs) == 4


def test_prompt_logprobs_of_a_prompt_cut_short(simulation: Callable[..., Any]) -> None:
    """C2, F9: an abort in mid-prompt keeps those computed; a retraction starts them over, on new weights."""
    sim = simulation(pages=40, budget=4)
    aborted, retracted = (sim.add([number, 2, 3, 4, 5], prompt_start=0)[0] for number in (1, 6))
    sim.step()
    sim.abort(aborted)
    assert len(aborted.prompt_logprobs) == 4
    sim.step()
    assert len(retracted.prompt_logprobs) == 4 and retracted.output_len == 0
    sim.change_weights()
    assert retracted.prompt_logprobs == []
    sim.drain()


def test_cached_tokens_are_those_of_the_first_admission(simulation: Callable[..., Any]) -> None:
    """What a retracted request finds again of its own doesn't count as cached."""
    sim = simulation(pages=40)
    [request] = sim.add([1, 2, 3, 4, 5])
    sim.step()
    sim.retract(request)
    sim.drain()
    assert (request.cached_tokens, sim.prefilled) == (0, 5 + 2)


def test_a_sample_that_finds_no_page_waits_and_ends_right(simulation: Callable[..., Any]) -> None:
    """F4, C3: with room for one sample, the others go back to the queue in their order and miss nothing."""
    sim = simulation(pages=2, page_size=4)
    samples = sim.add([1, 2, 3, 4, 5], n=3, max_new=3)
    plan = sim.step()
    assert plan.forks == {} and [s.status for s in samples[1:]] == [Status.WAITING, Status.WAITING]
    sim.drain()
    assert sim.ended == samples
    assert sim.prefilled == 5 + 1 + 1, "the full page was kept for them"


@pytest.mark.parametrize("disturbance", ["abort", "retract"])
def test_a_leader_lost_in_mid_prompt_is_replaced(simulation: Callable[..., Any], disturbance: str) -> None:
    """C2, C9: those who waited for its prompt go on from what it had computed."""
    sim = simulation(pages=20, page_size=2, budget=3)
    leader, *others = sim.add(range(1, 10), n=4)
    sim.step()
    assert [request.leader for request in others] == [leader] * 3 and leader.computed == 3
    getattr(sim, disturbance)(leader)
    assert [request.status for request in others] == [Status.WAITING] * 3
    sim.step()
    assert others[1].leader is (others[0] if disturbance == "abort" else leader)
    sim.drain()
    assert sim.prefilled == 9 + 1, "one token lay on a page that wasn't full"


def test_an_aborted_follower_leaves_the_others(simulation: Callable[..., Any]) -> None:
    """C2: a sample that is aborted while another computes its prompt is simply gone."""
    sim = simulation(pages=20, budget=3)
    leader, follower, other = sim.add(range(1, 10), n=3)
    sim.step()
    sim.abort(follower)
    assert leader.followers == [other]
    sim.drain()
    assert follower.output_ids == []


def test_broken_numbers_end_one_request_and_are_not_cached(simulation: Callable[..., Any]) -> None:
    """F7: the request ends in `abort`, its neighbours go on, and its prompt is computed anew next time."""
    sim = simulation(pages=40)
    broken, fine = sim.add([1, 2, 3, BROKEN], n=2), sim.add([1, 2, 3, 4, 5])
    sim.step()
    sim.drain()
    assert [request.finish_reason["type"] for request in broken] == ["abort", "abort"]
    assert fine[0].output_len > 0
    [again] = sim.add([1, 2, 3, BROKEN])
    sim.drain()
    assert again.cached_tokens == 0
