"""A draw depends on the seed, the sample's index and the position, and on nothing that goes on around it."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_rl.core.seeds import draw_seed
from tokenspeed_rl_kernels.gumbel import row_keys

PROMPT_LEN = 37


def ids_of(results):
    return [tuple(result["output_ids"]) for result in results]


@pytest.fixture(scope="module")
def expected(tiny, engine):
    """Four seeded samples, drawn while nothing else runs."""
    params = {"n": 4, "seed": 5, "max_new_tokens": 20}
    return ids_of(engine.generate(input_ids=tiny.prompt(PROMPT_LEN), sampling_params=params))


def test_samples_of_a_seed_are_distinct_and_reproducible(tiny, engine, expected):
    """F4: n samples differ; the same request gives the same ones; another seed gives others."""
    prompt, params = tiny.prompt(PROMPT_LEN), {"n": 4, "max_new_tokens": 20}
    assert len(set(expected)) == 4
    again = engine.generate(input_ids=prompt, sampling_params={**params, "seed": 5})
    assert ids_of(again) == expected
    assert [result["meta_info"]["index"] for result in again] == [0, 1, 2, 3]
    other = engine.generate(input_ids=prompt, sampling_params={**params, "seed": 6})
    assert not set(ids_of(other)) & set(expected)


@pytest.mark.parametrize("n", [1, 2, 9])
def test_a_sample_does_not_depend_on_how_many_there_are(tiny, engine, expected, n):
    """F4: sample i of n is sample i of any other n."""
    params = {"n": n, "seed": 5, "max_new_tokens": 20}
    results = engine.generate(input_ids=[tiny.prompt(PROMPT_LEN)], sampling_params=params)
    assert ids_of(results)[:4] == expected[:n]


def test_without_a_seed_identical_prompts_differ(tiny, engine):
    """F4, F5: eight equal requests without a seed, in one call or one after another, are eight samples."""
    prompt, params = tiny.prompt(PROMPT_LEN), {"max_new_tokens": 12}
    together = engine.generate(input_ids=[prompt] * 8, sampling_params=params)
    apart = [engine.generate(input_ids=prompt, sampling_params=params) for _ in range(3)]
    assert len(set(ids_of([*together, *apart]))) == 11


def test_without_a_seed_the_engine_seed_and_the_request_number_decide(tiny, make_engine):
    """F5: two engines of one seed go through the same draws, an engine of another seed through others."""
    model, prompt = tiny.model(), tiny.prompt(8)

    def run(seed):
        engine = make_engine(model, seed=seed)
        return [engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 9}) for _ in range(3)]

    first, same, other = (ids_of(run(seed)) for seed in (3, 3, 4))
    assert first == same
    assert not set(first) & set(other)


@pytest.mark.parametrize("shape", ["n samples", "equal prompts"])
@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_is_computed_once_for_all_its_samples(tiny, make_engine, shape, caching):
    """F4: eight samples of one prompt cost one prefill, whether asked for as n or as a list of equals."""
    engine = make_engine(tiny.model(), enable_prefix_caching=caching)
    prompt, params = tiny.prompt(PROMPT_LEN), {"max_new_tokens": 6}
    if shape == "n samples":
        results = engine.generate(input_ids=prompt, sampling_params={**params, "n": 8})
    else:
        results = engine.generate(input_ids=[prompt] * 8, sampling_params=params)
    assert tiny.state(engine)["prefill_tokens"] == PROMPT_LEN
    assert len(set(ids_of(results))) == 8
    cached = sorted(result["meta_info"]["cached_tokens"] for result in results)
    assert cached == [0] + [PROMPT_LEN] * 7


@pytest.mark.parametrize("cut", [1, 11, 19])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.2}])
def test_a_resubmitted_partial_continues_identically(tiny, engine, cut, params):
    """F5: prompt plus the first tokens of an output, under the same seed, gives the other tokens."""
    prompt, params = tiny.prompt(PROMPT_LEN, seed=1), {"seed": 8, **params}
    whole = engine.generate(input_ids=prompt, sampling_params={**params, "max_new_tokens": 20})["output_ids"]
    rest = engine.generate(
        input_ids=prompt + whole[:cut], sampling_params={**params, "max_new_tokens": 20 - cut}
    )
    assert rest["output_ids"] == whole[cut:]


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False},
        {"page_size": 3, "chunked_prefill_size": 7},
        {"max_running_requests": 2},
        {"seed": 99},
        {"max_total_tokens": 112, "page_size": 4},
        {"chunked_prefill_size": 1},
    ],
    ids=str,
)
def test_neither_batch_mates_nor_order_nor_settings_change_a_draw(tiny, make_engine, expected, options):
    """F5: caching, paging, chunking, a small batch, the engine's seed, and retraction: the same samples, as
    first or as last of a crowd."""
    engine = make_engine(tiny.model(), **options)
    ours = (tiny.prompt(PROMPT_LEN), {"n": 4, "seed": 5, "max_new_tokens": 20})
    crowd = [(tiny.prompt(5 + 3 * i, seed=50 + i), {"max_new_tokens": 15 + i}) for i in range(7)]
    for order in ([ours, *crowd], [*crowd, ours]):
        prompts, params = zip(*order, strict=True)
        results = engine.generate(input_ids=list(prompts), sampling_params=list(params))
        chosen = [r for r in results if r["meta_info"]["prompt_index"] == order.index(ours)]
        assert ids_of(chosen) == expected
    assert (tiny.state(engine)["num_retractions"] > 0) == ("max_total_tokens" in options)


def test_the_order_of_submission_does_not_matter_with_seeds(tiny, engine):
    """F5: requests with seeds of their own give the same samples forwards and backwards."""
    prompts = [tiny.prompt(6 + i, seed=i) for i in range(10)]
    params = [{"seed": i, "max_new_tokens": 8, "temperature": 0.5 + i / 10} for i in range(10)]
    forward = engine.generate(input_ids=prompts, sampling_params=params)
    backward = engine.generate(input_ids=prompts[::-1], sampling_params=params[::-1])
    assert ids_of(forward) == ids_of(backward)[::-1]


def test_no_two_draws_share_their_noise():
    """F5: 120,000 keys of (seed or request, sample, position), neighbouring numbers all, don't collide."""
    seeds = [
        draw_seed(seed, index, engine_seed=engine_seed, number=number)
        for index in range(10)
        for seed, engine_seed, number in (
            *((seed, 0, 0) for seed in range(40)),
            *((None, engine_seed, number) for engine_seed in range(4) for number in range(20)),
        )
    ]
    keys = row_keys(torch.tensor(seeds).repeat_interleave(100), torch.arange(100).repeat(len(seeds)))
    assert keys.unique().numel() == len(seeds) * 100 == 120_000
