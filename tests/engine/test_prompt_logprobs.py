"""The logprobs of a prompt are those of a full recompute, however the prompt came to be computed."""

from __future__ import annotations

import asyncio

import pytest

LENGTH = 21


@pytest.fixture(scope="module")
def prompt(tiny):
    return tiny.prompt(LENGTH)


def check(tiny, model, prompt, result, start=0, temperature=1.0):
    """The triples from `start` on: the first without a value, the others equal to the reference."""
    triples = result["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in triples] == prompt[start:]
    assert triples[0][0] is None
    expected = tiny.ref_logprobs(model, prompt, temperature)[start:]
    assert [value for value, _, _ in triples[1:]] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_every_chunk_size_cold_and_warm(tiny, model, prompt, make_engine, page_size):
    """F9: chunks of 1 token up to the whole prompt, and once more when all of it is in the cache."""
    for chunk in range(1, LENGTH + 2):
        engine = make_engine(model, page_size=page_size, chunked_prefill_size=chunk, max_total_tokens=64)
        for _ in range(2):
            result = engine.generate(
                input_ids=prompt,
                sampling_params={"max_new_tokens": 2},
                return_logprob=True,
                logprob_start_len=0,
            )
            check(tiny, model, prompt, result)
            assert tiny.gap(model, prompt, result) < 1e-4
        engine.shutdown()


@pytest.mark.parametrize("warm", [0, 5, LENGTH], ids="{} tokens warm".format)
def test_from_every_start(tiny, model, prompt, make_engine, warm):
    """F9: `logprob_start_len` anywhere in the prompt; what was cached before it is not computed again."""
    for start in range(LENGTH):
        engine = make_engine(model, page_size=4, max_total_tokens=64)
        if warm:
            engine.generate(input_ids=prompt[:warm], sampling_params={"max_new_tokens": 1})
        result = engine.generate(
            input_ids=prompt,
            sampling_params={"max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=start,
        )
        check(tiny, model, prompt, result, start)
        assert result["meta_info"]["cached_tokens"] == min(warm, start) // 4 * 4
        engine.shutdown()


@pytest.mark.parametrize("temperature", [0, 0.5, 1.0])
def test_at_the_temperature_of_the_request(tiny, model, prompt, engine, temperature):
    """F9: prompt logprobs are of the kind "sampling", as the output's are; raw at temperature 0."""
    result = engine.generate(
        input_ids=prompt,
        sampling_params={"temperature": temperature, "max_new_tokens": 3},
        return_logprob=True,
        logprob_start_len=3,
    )
    check(tiny, model, prompt, result, 3, temperature)


def test_scoring_alone_generates_nothing(tiny, model, prompt, engine):
    """F9, F11: `max_new_tokens=0` gives the prompt's logprobs and no token."""
    for _ in range(2):
        result = engine.generate(
            input_ids=prompt,
            sampling_params={"max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=0,
        )
        check(tiny, model, prompt, result)
        assert result["output_ids"] == [] and result["meta_info"]["output_token_logprobs"] == []


@pytest.mark.parametrize("chunk", [3, 64])
def test_every_sample_of_a_prompt_has_them(tiny, model, prompt, make_engine, chunk):
    """F9: n > 1 and equal prompts in one call, asking for different parts, cold and warm."""
    engine = make_engine(model, chunked_prefill_size=chunk, page_size=4)
    for start in (0, 7, 20, 0):
        results = engine.generate(
            input_ids=[prompt, prompt],
            sampling_params={"n": 3, "max_new_tokens": 4},
            return_logprob=True,
            logprob_start_len=start,
        )
        assert len(results) == 6
        for result in results:
            check(tiny, model, prompt, result, start)
            assert tiny.gap(model, prompt, result) < 1e-4


@pytest.mark.parametrize("first", [False, True])
def test_equal_prompts_that_ask_for_different_things(tiny, model, prompt, make_engine, first):
    """F9: one of two equal prompts in flight wants prompt logprobs, at a temperature of its own."""
    engine = make_engine(model, chunked_prefill_size=8)
    with_logprobs = engine.async_generate(
        input_ids=prompt,
        sampling_params={"max_new_tokens": 3, "temperature": 0.5},
        return_logprob=True,
        logprob_start_len=0,
    )
    without = engine.async_generate(
        input_ids=prompt, sampling_params={"max_new_tokens": 3}, return_logprob=True
    )

    async def both():
        return await asyncio.gather(*((with_logprobs, without) if first else (without, with_logprobs)))

    results = engine.llm.run(both())
    asked, plain = results if first else results[::-1]
    check(tiny, model, prompt, asked, temperature=0.5)
    assert "input_token_logprobs" not in plain["meta_info"]
    assert tiny.gap(model, prompt, plain) < 1e-4


def test_retraction_in_the_middle_of_prompt_and_output(tiny, model, make_engine):
    """F9: with a KV cache far too small for all, prompts are computed again, and nothing is counted twice."""
    engine = make_engine(model, page_size=4, chunked_prefill_size=5, max_total_tokens=72)
    prompts = [tiny.prompt(18 + i, seed=i) for i in range(8)]
    results = engine.generate(
        input_ids=prompts,
        sampling_params={"max_new_tokens": 30},
        return_logprob=True,
        logprob_start_len=0,
    )
    assert tiny.state(engine)["num_retractions"] > 3
    for prompt, result in zip(prompts, results, strict=True):
        check(tiny, model, prompt, result)
        assert tiny.gap(model, prompt, result) < 1e-4


def test_an_update_in_the_middle_of_a_prompt_starts_its_logprobs_over(tiny, make_engine):
    """F9, D1: all prompt logprobs are of one set of weights, those the first token is drawn with; samples
    that waited for the prompt still share it."""
    model, prompt = tiny.model(), tiny.prompt(40)
    engine = make_engine(model, chunked_prefill_size=8)
    engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 1})

    def train():
        model.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)
        engine.weights_changed("trained")

    updated = tiny.after_step(engine, 3, train)
    results = engine.generate(
        input_ids=prompt,
        sampling_params={"n": 3, "max_new_tokens": 5},
        return_logprob=True,
        logprob_start_len=0,
    )
    updated.result(20)
    for result in results:
        check(tiny, model, prompt, result)
        assert tiny.gap(model, prompt, result) < 1e-4
        assert result["meta_info"]["weight_versions"] == [{"version": "trained", "start": 0, "end": 5}]
    assert tiny.state(engine)["prefill_tokens"] == 1 + 24 + 40
