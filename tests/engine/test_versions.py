"""After an update nothing of the older weights is used, and every token says which weights drew it."""

from __future__ import annotations

import copy

import pytest
import torch

from tokenspeed_rl.requests import GenerateReqInput


def snapshot(model):
    """A module of its own with the weights of now."""
    return copy.deepcopy(model)


def train(model, seed=0, scale=0.05):
    """Write other weights in place, as an optimiser does, norms included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def spans(result):
    return [(s["version"], s["start"], s["end"]) for s in result["meta_info"]["weight_versions"]]


def check_spans(tiny, models, prompt, result):
    """Contiguous spans cover the output, and each token is exact under the weights of its span."""
    output, triples = result["output_ids"], result["meta_info"]["output_token_logprobs"]
    edges = spans(result)
    assert [start for _, start, _ in edges] == [0, *(end for _, _, end in edges[:-1])]
    assert edges[-1][2] == result["meta_info"]["completion_tokens"] == len(output)
    assert result["meta_info"]["weight_version"] == edges[-1][0]
    for version, start, end in edges:
        refs = tiny.ref_logprobs(models[version], [*prompt, *output])[len(prompt) - 1 :]
        assert [v for v, _, _ in triples[start:end]] == pytest.approx(refs[start:end], abs=1e-4)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_warm_prompt_is_computed_anew(tiny, make_engine, family, tied):
    """D1, D4: each of two updates is seen by the very next request, by every tensor derived from the weights
    (fused, tied, transposed), and nothing cached is used."""
    model = tiny.model(family, tie_word_embeddings=tied)
    engine, prompt = make_engine(model, page_size=4), tiny.prompt(30)
    ask = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 8, "seed": 0}}
    for number in range(3):
        if number:
            train(model, number)
            receipt = engine.weights_changed()
            assert (receipt.version, receipt.bytes) == (str(number), 0)
        for cached in (0, 28):
            result = engine.generate(**ask, return_logprob=True, logprob_start_len=29)
            assert result["meta_info"]["cached_tokens"] == cached
            assert spans(result) == [("default" if number == 0 else str(number), 0, 8)]
            assert tiny.gap(model, prompt, result) < 1e-4


def test_another_module_is_another_set_of_weights(tiny, make_engine):
    """D1, E13: `share_weights` on an engine that had its own weights, and again with a second module."""
    engine, prompt = make_engine(tiny.config(), page_size=4, weight_version="first"), tiny.prompt(30)
    ask = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 8}, "return_logprob": True}
    assert spans(engine.generate(**ask)) == [("first", 0, 8)]
    for number, seed in enumerate((1, 2), start=1):
        model = tiny.model(seed=seed)
        assert engine.share_weights(model).version == str(number)
        result = engine.generate(**ask)
        assert result["meta_info"]["cached_tokens"] == 0
        assert tiny.gap(model, prompt, result) < 1e-4


@pytest.mark.parametrize("caching", [True, False])
def test_the_output_splits_exactly_at_each_update(tiny, make_engine, caching):
    """D3: two updates of a live request make three spans; tokens after an update are exact under the new
    weights, given all the tokens before it."""
    model = tiny.model()
    engine = make_engine(model, page_size=4, enable_prefix_caching=caching)
    prompt, models = tiny.prompt(30), {"default": snapshot(model)}

    def update(version):
        train(model, len(models))
        models[version] = snapshot(model)
        engine.weights_changed(version)

    first = tiny.after_step(engine, 4, lambda: update("one"))
    second = tiny.after_step(engine, 11, lambda: update("two"))
    results = engine.generate(
        input_ids=prompt, sampling_params={"n": 3, "max_new_tokens": 20}, return_logprob=True
    )
    first.result(20), second.result(20)
    for result in results:
        assert spans(result) == [("default", 0, 4), ("one", 4, 11), ("two", 11, 20)]
        check_spans(tiny, models, prompt, result)


def test_the_same_label_does_not_split(tiny, make_engine):
    """D3, E17: an update under the label of before is one span, and still another set of weights."""
    model = tiny.model()
    engine, prompt = make_engine(model, page_size=4), tiny.prompt(30)
    old = snapshot(model)

    def update():
        train(model)
        engine.weights_changed("default")

    updated = tiny.after_step(engine, 5, update)
    params = {"max_new_tokens": 12}
    result = engine.generate(input_ids=prompt, sampling_params=params, return_logprob=True)
    updated.result(20)
    assert spans(result) == [("default", 0, 12)]
    values = [value for value, _, _ in result["meta_info"]["output_token_logprobs"]]
    ids = [*prompt, *result["output_ids"]]
    assert values[:5] == pytest.approx(tiny.ref_logprobs(old, ids)[29:34], abs=1e-4)
    assert values[5:] == pytest.approx(tiny.ref_logprobs(model, ids)[34:], abs=1e-4)
    again = engine.generate(input_ids=prompt, sampling_params=params, return_logprob=True)
    assert again["meta_info"]["cached_tokens"] < 30 and tiny.gap(model, prompt, again) < 1e-4


def test_five_updates_with_a_request_always_live(tiny, make_engine):
    """D2: requests that begin alike and come between the updates are exact under the weights they name, and
    none is refused."""
    model, models = tiny.model(), {}
    engine, prompt = make_engine(model, page_size=4), tiny.prompt(40)
    models["default"] = snapshot(model)
    others, calls = [], []

    def update(version):
        train(model, len(models), 0.02)
        models[version] = snapshot(model)
        engine.weights_changed(version)

    def ask():
        params = {"max_new_tokens": 6}
        others.append(engine.generate(input_ids=prompt, sampling_params=params, return_logprob=True))

    for number in range(1, 6):
        calls.append(tiny.after_step(engine, 10 * number, lambda v=str(number): update(v)))
        calls.append(tiny.after_step(engine, 10 * number + 3, ask))
    result = engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 70}, return_logprob=True)
    for call in calls:
        call.result(20)
    assert spans(result) == [
        ("default", 0, 10),
        *((str(i), 10 * i, 10 * i + 10) for i in range(1, 5)),
        ("5", 50, 70),
    ]
    for each in (result, *others):
        check_spans(tiny, models, prompt, each)
    assert sorted(spans(other)[0][0] for other in others) == ["1", "2", "3", "4", "5"]


def test_an_update_while_memory_is_short(tiny, make_engine):
    """C3, D3: retracted, queued and running requests alike are exact under their spans after the update."""
    model = tiny.model()
    engine = make_engine(model, page_size=4, max_total_tokens=120)
    models = {"default": snapshot(model)}
    engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 1})

    def update():
        train(model)
        models["1"] = snapshot(model)
        engine.weights_changed()

    updated = tiny.after_step(engine, 45, update)
    prompts = [tiny.prompt(9 + i, seed=i) for i in range(10)]
    results = engine.generate(input_ids=prompts, sampling_params={"max_new_tokens": 40}, return_logprob=True)
    updated.result(20)
    assert tiny.state(engine)["num_retractions"] > 5
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result["output_ids"]) == 40
        check_spans(tiny, models, prompt, result)
    assert {spans(result)[0][0] for result in results} == {"default", "1"}
    assert max(len(spans(result)) for result in results) == 2


def test_a_request_aborted_in_the_queue_has_an_empty_span(tiny, make_engine):
    """D3: of the weights of that moment."""
    model = tiny.model()
    engine = make_engine(model, weight_version="w7")
    with tiny.held(engine):
        waiting = engine.client.generate_request(GenerateReqInput(input_ids=[1, 2]))
        engine.abort()

    async def take():
        return await anext(waiting)

    result = engine.llm.run(take())
    assert result["output_ids"] == [] and spans(result) == [("w7", 0, 0)]
    assert result["meta_info"]["weight_version"] == "w7"


def test_thirty_updates_do_not_add_up(tiny, make_engine):
    """F13: the largest difference from a full recompute is as small after the last as after the first."""
    model = tiny.model()
    engine, prompt = make_engine(model), tiny.prompt(30)
    gaps = []
    for number in range(30):
        train(model, number, 0.01)
        engine.weights_changed()
        result = engine.generate(
            input_ids=prompt, sampling_params={"n": 4, "max_new_tokens": 12}, return_logprob=True
        )
        gaps.append(max(tiny.gap(model, prompt, each) for each in result))
    assert max(gaps) < 2e-5
    assert max(gaps[20:]) < 4 * max(gaps[:10])
    state = tiny.state(engine)
    assert (state["weight_version"], state["weight_epoch"]) == ("30", 31)
