"""Tokens and logprobs are those of a full recompute, whatever shares the batch, the cache and the pages."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_rl import Engine


def crowd(tiny, count, seed=0, longest=60):
    """Prompts of all lengths, some beginning alike, with parameters of all kinds."""
    rng, stems = random.Random(seed), [tiny.prompt(longest, seed=s) for s in range(3)]
    prompts, params = [], []
    for number in range(count):
        length = rng.randint(1, longest)
        keep = rng.choice([0, length // 2, length])
        prompts.append(rng.choice(stems)[:keep] + tiny.prompt(length - keep, seed=1000 + number))
        params.append(
            {
                "seed": number,
                "max_new_tokens": rng.randint(1, 24),
                "temperature": rng.choice([0, 0.5, 1.0, 1.3]),
                "top_k": rng.choice([-1, 20]),
                "top_p": rng.choice([1.0, 0.9]),
                "repetition_penalty": rng.choice([1.0, 1.2]),
            }
        )
    return prompts, params


def values(result):
    return [value for value, _, _ in result["meta_info"]["output_token_logprobs"]]


def check(tiny, model, prompts, params, results, bound=1e-4):
    for prompt, param, result in zip(prompts, params, results, strict=True):
        assert result["meta_info"]["finish_reason"]["type"] == "length"
        assert tiny.gap(model, prompt, result, param["temperature"]) < bound


@pytest.fixture(scope="module")
def alone(tiny, engine):
    """64 requests, each answered while nothing else runs and nothing is cached."""
    prompts, params = crowd(tiny, 64)
    results = []
    for prompt, param in zip(prompts, params, strict=True):
        engine.flush_cache()
        results.append(engine.generate(input_ids=prompt, sampling_params=param, return_logprob=True))
    return prompts, params, results


def test_alone_equals_the_reference(tiny, model, alone):
    """F12: the base that the others are held against is right itself."""
    check(tiny, model, *alone, bound=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False, "chunked_prefill_size": 100},
        {"page_size": 1, "max_running_requests": 20},
        {"page_size": 7, "chunked_prefill_size": 33},
        {"page_size": 4, "max_total_tokens": 256},
    ],
    ids=str,
)
def test_in_a_batch_of_64_as_alone(alone, model, make_engine, options):
    """F12: same ids, logprobs within 1e-5, in any order, under any paging, with retractions."""
    engine = make_engine(model, **options)
    prompts, params, expected = alone
    order = list(range(64))
    random.Random(len(options)).shuffle(order)
    results = engine.generate(
        input_ids=[prompts[i] for i in order],
        sampling_params=[params[i] for i in order],
        return_logprob=True,
    )
    for at, result in zip(order, results, strict=True):
        assert result["output_ids"] == expected[at]["output_ids"]
        assert values(result) == pytest.approx(values(expected[at]), abs=1e-5)


@settings(max_examples=12)
@given(data=st.data())
def test_any_composition_of_the_batch(tiny, model, data):
    """F12: random engines and random batches, one after another on a warm cache, stay at the reference."""
    integers = st.integers
    options = {
        "page_size": data.draw(integers(1, 20), "page_size"),
        "chunked_prefill_size": data.draw(integers(1, 80), "chunk"),
        "max_running_requests": data.draw(integers(1, 12), "running"),
        "enable_prefix_caching": data.draw(st.booleans(), "caching"),
        "max_total_tokens": data.draw(st.sampled_from([120, 200, 1000]), "capacity"),
    }
    with Engine(model, **options) as engine:
        for _ in range(2):
            prompts, params = crowd(
                tiny, data.draw(integers(1, 8), "requests"), data.draw(integers(0, 9), "seed")
            )
            results = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
            check(tiny, model, prompts, params, results)
        pages = tiny.state(engine)["pages"]
        assert pages["free"] + pages["idle"] == pages["total"]


@pytest.mark.parametrize("caching", [True, False])
def test_retraction_loses_nothing(tiny, model, make_engine, caching):
    """C3, F12: with a third of the memory that is wanted every output is that of a full recompute, with one
    span, and is prefilled again only as far as needed."""
    engine = make_engine(model, page_size=4, max_total_tokens=160, enable_prefix_caching=caching)
    prompts = [tiny.prompt(9 + i, seed=i) for i in range(12)]
    params = [{"seed": i, "max_new_tokens": 40, "temperature": 0.9} for i in range(12)]
    results = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
    assert tiny.state(engine)["num_retractions"] > 5
    check(tiny, model, prompts, params, results)
    assert all(len(result["output_ids"]) == 40 for result in results)
    assert {len(result["meta_info"]["weight_versions"]) for result in results} == {1}


@pytest.mark.parametrize("length", [3, 16, 50])
@pytest.mark.parametrize("page_size", [4, 16])
def test_groups_that_decode_over_shared_pages(tiny, model, make_engine, length, page_size):
    """F12: three groups of samples, each over one copy of its prompt, beside a request of its own."""
    engine = make_engine(model, page_size=page_size)
    prompts = [*(tiny.prompt(length, seed=i) for i in range(3)), tiny.prompt(21, seed=9)]
    counts = [6, 2, 5, 1]
    params = [{"n": n, "seed": 2, "max_new_tokens": 20 + n, "temperature": 0.8} for n in counts]
    results = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
    each = [i for i, n in enumerate(counts) for _ in range(n)]
    check(tiny, model, [prompts[i] for i in each], [params[i] for i in each], results)


@pytest.mark.parametrize("window", [1, 5, 16])
@pytest.mark.parametrize("options", [{}, {"page_size": 4, "chunked_prefill_size": 13}], ids=str)
def test_a_sliding_window_far_shorter_than_the_prompt(tiny, make_engine, window, options):
    """F12: Mistral: prompt and output run far past the window, in chunks, in groups and from a warm cache."""
    model = tiny.model("mistral", sliding_window=window)
    engine = make_engine(model, **options)
    prompt, params = tiny.prompt(100), {"n": 3, "seed": 1, "max_new_tokens": 30}
    for _ in range(2):
        results = engine.generate(
            input_ids=[prompt, prompt[:70]],
            sampling_params=params,
            return_logprob=True,
            logprob_start_len=50,
        )
        for result in results[:3]:
            assert tiny.gap(model, prompt, result) < 1e-4
            scored = [value for value, _, _ in result["meta_info"]["input_token_logprobs"][1:]]
            assert scored == pytest.approx(tiny.ref_logprobs(model, prompt)[50:], abs=1e-4)
        for result in results[3:]:
            assert tiny.gap(model, prompt[:70], result) < 1e-4


def test_a_warm_cache_saves_the_prompt_and_changes_nothing(tiny, model, make_engine):
    """F12: `cached_tokens` counts whole pages of what was seen before, outputs included, never all of it."""
    engine = make_engine(model, page_size=4)
    prompt, params = tiny.prompt(24), {"max_new_tokens": 10, "temperature": 0}
    cold = engine.generate(input_ids=prompt, sampling_params=params, return_logprob=True)
    warm = engine.generate(input_ids=prompt, sampling_params=params, return_logprob=True)
    assert (cold["meta_info"]["cached_tokens"], warm["meta_info"]["cached_tokens"]) == (0, 20)
    assert warm["output_ids"] == cold["output_ids"]
    assert values(warm) == pytest.approx(values(cold), abs=1e-5)
    longer = prompt + cold["output_ids"]
    turn = engine.generate(input_ids=longer, sampling_params=params, return_logprob=True)
    assert turn["meta_info"]["cached_tokens"] == 32
    assert tiny.gap(model, longer, turn) < 1e-4
    assert engine.flush_cache().success
    again = engine.generate(input_ids=longer, sampling_params=params, return_logprob=True)
    assert (again["meta_info"]["cached_tokens"], again["output_ids"]) == (0, turn["output_ids"])
