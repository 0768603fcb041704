"""A request whose logits are not finite ends alone; nobody else notices, and its KV is not kept."""

from __future__ import annotations

import math

import pytest
import torch

from tokenspeed_rl.requests import GenerateReqInput

POISON = 7


@pytest.fixture
def poisoned(tiny):
    """A model whose embedding of one token is NaN: whoever has it in the context has NaN logits."""
    model = tiny.model()
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = math.nan
    return model


@pytest.fixture
def clean():
    return [token for token in range(20, 57) if token != POISON]


def assert_faulty(result, tokens=0):
    meta = result["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert "finite" in meta["finish_reason"]["message"]
    assert len(result["output_ids"]) == meta["completion_tokens"] == tokens
    assert len(meta["output_token_logprobs"]) == tokens
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": tokens}]


@pytest.mark.parametrize("at", [0, 20, 36])
@pytest.mark.parametrize("chunk", [8, 2048])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_it_ends_alone(tiny, poisoned, clean, make_engine, at, chunk, temperature):
    """F7: its neighbours of the same batch are exact, the engine lives, every page comes back."""
    engine = make_engine(poisoned, page_size=4, chunked_prefill_size=chunk)
    bad = [*clean[:at], POISON, *clean[at:]]
    params = {"n": 2, "max_new_tokens": 12, "temperature": temperature, "logit_bias": {POISON: -math.inf}}
    results = engine.generate(
        input_ids=[clean, bad, clean[5:]], sampling_params=params, return_logprob=True, top_logprobs_num=1
    )
    assert_faulty(results[2])
    assert_faulty(results[3])
    for result, prompt in zip(results[:2] + results[4:], [clean] * 2 + [clean[5:]] * 2, strict=True):
        assert result["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
        assert tiny.gap(poisoned, prompt, result, temperature) < 1e-4
    state = tiny.state(engine)["pages"]
    assert state["free"] + state["idle"] == state["total"]


def test_its_prefix_is_not_cached(tiny, poisoned, clean, make_engine):
    """F7: asked again nothing of it is found, and a prompt that begins alike is exact."""
    engine = make_engine(poisoned, page_size=4)
    bad = [*clean[:8], POISON, *clean[8:]]
    params = {"max_new_tokens": 3, "temperature": 0}
    for _ in range(2):
        result = engine.generate(input_ids=bad, sampling_params=params, return_logprob=True)
        assert_faulty(result)
        assert result["meta_info"]["cached_tokens"] == 0
    result = engine.generate(input_ids=clean, sampling_params=params, return_logprob=True)
    assert tiny.gap(poisoned, clean, result) < 1e-4


def test_a_prompt_that_is_only_scored_ends_so_too(tiny, poisoned, clean, make_engine):
    """F7, F11: `max_new_tokens=0` draws nothing, but must not pass NaN off as logprobs, nor keep the KV."""
    engine = make_engine(poisoned, page_size=4)
    bad = [*clean, POISON, *clean]
    params = {"max_new_tokens": 0}
    for prompt in (bad, bad, clean):
        result = engine.generate(
            input_ids=prompt, sampling_params=params, return_logprob=True, logprob_start_len=0
        )
        if prompt is bad:
            assert_faulty(result)
            assert result["meta_info"]["cached_tokens"] == 0
        else:
            values = [value for value, _, _ in result["meta_info"]["input_token_logprobs"][1:]]
            assert values == pytest.approx(tiny.ref_logprobs(poisoned, clean), abs=1e-4)


def test_a_sample_that_turns_bad_keeps_what_it_has(tiny, poisoned, clean, make_engine):
    """F7: the tokens before the fault stay, with their logprobs; of n samples only that one ends."""
    poisoned.generation_config.eos_token_id = None
    engine = make_engine(poisoned)
    params = [
        {"max_new_tokens": 9, "seed": 1, "logit_bias": {POISON: 100.0}},
        {"max_new_tokens": 9, "seed": 1, "logit_bias": {POISON: -math.inf}},
    ]
    bad, good = engine.generate(input_ids=[clean, clean], sampling_params=params, return_logprob=True)
    assert_faulty(bad, tokens=1)
    assert bad["output_ids"] == [POISON]
    assert len(good["output_ids"]) == 9
    assert tiny.gap(poisoned, clean, good) < 1e-4


def test_healed_by_an_update(tiny, poisoned, clean, make_engine):
    """F7, D1: after the weights are right again the same prompt is answered exactly."""
    engine = make_engine(poisoned)
    prompt, params = [POISON, *clean], {"max_new_tokens": 4}
    assert_faulty(engine.generate(input_ids=prompt, sampling_params=params, return_logprob=True))
    with torch.no_grad():
        poisoned.model.embed_tokens.weight[POISON] = 0.1
    engine.weights_changed()
    result = engine.generate(input_ids=prompt, sampling_params=params, return_logprob=True)
    assert tiny.gap(poisoned, prompt, result) < 1e-4


def test_bias_that_leaves_nothing_to_draw_says_so(tiny, engine):
    """F7: banning the whole vocabulary is that request's own fault, by another message."""
    params = {"logit_bias": dict.fromkeys(range(256), -math.inf), "max_new_tokens": 2}
    result = engine.generate(input_ids=[3], sampling_params=params)
    reason = result["meta_info"]["finish_reason"]
    assert (result["output_ids"], reason["type"]) == ([], "abort") and "bias" in reason["message"]


@pytest.mark.parametrize("max_new", [0, 2])
def test_a_window_that_has_passed_the_fault_does_not_hide_it(tiny, make_engine, max_new):
    """F7, F9: where the last position no longer sees the fault, the prompt's logprobs still tell."""
    model = tiny.model("mistral", sliding_window=4)
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = math.nan
    engine, prompt = make_engine(model, page_size=4), [1, POISON, *range(20, 60)]
    params = {"max_new_tokens": max_new}
    result = engine.generate(
        input_ids=prompt, sampling_params=params, return_logprob=True, logprob_start_len=0
    )
    assert_faulty(result)


@pytest.mark.parametrize("scored", [False, True], ids=["generated", "prompt logprobs too"])
@pytest.mark.parametrize("chunk", [21, 22, 38, 2048])
@pytest.mark.parametrize("first", ["clean", "bad"])
def test_what_begins_alike_is_not_spoilt(tiny, poisoned, clean, make_engine, first, chunk, scored):
    """F7: attention spreads the fault over the KV of its whole chunk, back to pages that a neighbour has in
    common: that one is exact all the same, whoever computes those pages, and n samples of it too."""
    engine = make_engine(poisoned, page_size=4, chunked_prefill_size=chunk)
    prompts = {"clean": clean, "bad": [*clean[:20], POISON, *clean[20:]]}
    order = [first, "bad" if first == "clean" else "clean"]
    params = {"n": 2, "max_new_tokens": 2, "logit_bias": {POISON: -math.inf}}
    start = {"logprob_start_len": 0} if scored else {}
    for _ in range(2):
        results = engine.generate(
            input_ids=[prompts[name] for name in order],
            sampling_params=params,
            return_logprob=True,
            **start,
        )
        for name, result in zip([order[0]] * 2 + [order[1]] * 2, results, strict=True):
            if name == "bad":
                assert_faulty(result)
                continue
            assert len(result["output_ids"]) == 2
            assert tiny.gap(poisoned, clean, result) < 1e-4
            if scored:
                values = [value for value, _, _ in result["meta_info"]["input_token_logprobs"][1:]]
                assert values == pytest.approx(tiny.ref_logprobs(poisoned, clean), abs=1e-4)
    tiny.all_back(engine)


def test_who_starts_over_alone_lends_nothing(tiny, poisoned, clean, make_engine):
    """F7: a request that computes everything itself, after KV it had borrowed came under suspicion, keeps no
    page for others. One with the same prompt beside it is exact, and so is whoever finds that one's pages."""
    healed = tiny.model()
    engine = make_engine(poisoned, page_size=4, max_total_tokens=512)
    greedy, short = {"temperature": 0, "max_new_tokens": 12}, clean[:8]
    engine.generate(input_ids=[*short, 1], sampling_params={"max_new_tokens": 1})  # two pages to borrow
    prompt = [*short, POISON, 9, 8, 5, 4, 3]
    paused = tiny.after_step(engine, 1, lambda: engine.pause("retract"))  # right after its fault
    first = engine.client.generate_request(GenerateReqInput(input_ids=prompt, sampling_params=greedy))
    assert paused.result(20) and tiny.state(engine)["num_waiting"] == 1
    with torch.no_grad():
        poisoned.model.embed_tokens.weight.copy_(healed.model.embed_tokens.weight)
    engine.weights_changed("healed")
    second = engine.client.generate_request(
        GenerateReqInput(input_ids=prompt, sampling_params=greedy, return_logprob=True)
    )
    engine.resume()
    assert engine.llm.run(first.result(20))["meta_info"]["finish_reason"]["type"] == "length"
    result = engine.llm.run(second.result(20))
    assert tiny.gap(healed, prompt, result) < 1e-4
    whole = [*prompt, *result["output_ids"]]
    for start in range(0, len(whole) - 8, 4):  # whatever any page of them could be mistaken for
        victim = [*whole[start : start + 8], 1]
        found = engine.generate(input_ids=victim, sampling_params=greedy, return_logprob=True)
        assert tiny.gap(healed, victim, found) < 1e-4
