"""A prompt or a length at the edge of what fits has a defined end, or is refused; never an empty success."""

from __future__ import annotations

import pytest

from tokenspeed_rl.errors import RequestError

CONTEXT = 32


@pytest.fixture(scope="module")
def small(tiny):
    return tiny.model(max_position_embeddings=CONTEXT)


def check(tiny, model, prompt, result, length):
    meta = result["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": length}
    assert len(result["output_ids"]) == meta["completion_tokens"] == length
    assert meta["prompt_tokens"] == len(prompt)
    assert tiny.gap(model, prompt, result) < 1e-4


@pytest.mark.parametrize("page_size", [16, 5])
@pytest.mark.parametrize("max_new", [None, 0, 1, 2, 31, 100])
@pytest.mark.parametrize("length", [1, CONTEXT - 2, CONTEXT - 1])
def test_a_prompt_that_fits_ends_with_the_context_or_before(
    tiny, small, make_engine, page_size, max_new, length
):
    """F11: as many tokens as asked for, or as the context holds; 0 only scores the prompt."""
    engine, prompt = make_engine(small, page_size=page_size), tiny.prompt(length)
    params = {"max_new_tokens": max_new, "n": 2}
    for result in engine.generate(input_ids=prompt, sampling_params=params, return_logprob=True):
        check(tiny, small, prompt, result, min(CONTEXT - length, 100 if max_new is None else max_new))


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 10 * CONTEXT])
@pytest.mark.parametrize("max_new", [None, 1, 100])
def test_a_prompt_that_leaves_no_room_is_refused(tiny, small, make_engine, length, max_new):
    """F11: prompt >= context names both lengths, and the engine goes on."""
    engine = make_engine(small)
    with pytest.raises(RequestError, match=f"{length} tokens.* context of {CONTEXT}"):
        engine.generate(input_ids=tiny.prompt(length), sampling_params={"max_new_tokens": max_new})
    assert len(engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 2})["output_ids"]) == 2


def test_a_prompt_that_fills_the_context_can_be_scored(tiny, small, make_engine):
    """F11: with `max_new_tokens=0` no room is needed; one token more than the context is refused."""
    engine, prompt = make_engine(small), tiny.prompt(CONTEXT)
    params = {"max_new_tokens": 0}
    result = engine.generate(
        input_ids=prompt, sampling_params=params, return_logprob=True, logprob_start_len=0
    )
    values = [value for value, _, _ in result["meta_info"]["input_token_logprobs"][1:]]
    assert values == pytest.approx(tiny.ref_logprobs(small, prompt), abs=1e-4)
    assert result["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    with pytest.raises(RequestError, match="context"):
        engine.generate(input_ids=[*prompt, 1], sampling_params=params)


def test_max_model_len_is_the_context(tiny, small, make_engine):
    """F11: a shorter context that the config asks for is where samples end."""
    engine, prompt = make_engine(small, max_model_len=12), tiny.prompt(9)
    result = engine.generate(input_ids=prompt, return_logprob=True)
    check(tiny, small, prompt, result, 3)
    with pytest.raises(RequestError, match="context of 12"):
        engine.generate(input_ids=tiny.prompt(12))


def test_the_kv_capacity_refuses_what_can_never_fit(tiny, small, make_engine):
    """F11: prompt + explicit `max_new_tokens` over the capacity is refused; without it the sample ends
    there."""
    engine = make_engine(small, page_size=4, max_total_tokens=20)
    prompt = tiny.prompt(9)
    with pytest.raises(RequestError, match="capacity of 20"):
        engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 12})
    for params, length in (({"max_new_tokens": 11}, 11), ({}, 11)):
        result = engine.generate(input_ids=prompt, sampling_params=params, return_logprob=True)
        check(tiny, small, prompt, result, length)
    with pytest.raises(RequestError, match="capacity of 20"):
        engine.generate(input_ids=tiny.prompt(20))


def test_an_empty_prompt_is_refused(engine):
    """F11: `input_ids=[]`, also as one of many, and an empty text."""
    for empty in ({"input_ids": []}, {"input_ids": [[1], []]}, {"prompt": ""}, {"prompt": ["a", ""]}):
        with pytest.raises(RequestError):
            engine.generate(**empty, sampling_params={"max_new_tokens": 1})


@pytest.mark.parametrize("capacity", [16, 17, 20])
def test_a_capacity_that_is_no_multiple_of_a_page_is_kept_to_the_token(tiny, small, make_engine, capacity):
    """F11: `max_total_tokens` is what it says: that many fit, one more does not."""
    engine = make_engine(small, page_size=16, max_total_tokens=capacity)
    with pytest.raises(RequestError, match=f"capacity of {capacity}"):
        engine.generate(input_ids=[5], sampling_params={"max_new_tokens": capacity})
    params = {"max_new_tokens": capacity - 1}
    result = engine.generate(input_ids=[5], sampling_params=params, return_logprob=True)
    check(tiny, small, [5], result, capacity - 1)


def test_a_huge_length_ends_with_the_context_whatever_may_run_at_once(tiny, small, make_engine):
    """F11: how many requests may run, and so how much is mapped, is no limit of one request's length."""
    for options in ({"max_total_tokens": None}, {"max_total_tokens": 2_000_000, "page_size": 64}):
        engine = make_engine(small, max_running_requests=1, **options)
        result = engine.generate(
            input_ids=[5], sampling_params={"max_new_tokens": 10**6}, return_logprob=True
        )
        check(tiny, small, [5], result, CONTEXT - 1)
