"""What a request asks of the draw is what it is drawn from, told apart by kind of logprob."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

KINDS = ("raw", "sampling", "processed")
BANNED = [*range(0, 256, 3)]
CASES = {
    "nothing": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "temperature before filters": {"temperature": 0.5, "top_p": 0.8},
    "top_k before top_p": {"top_k": 8, "top_p": 0.7},
    "top_p before min_p": {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "temperature": 1.4},
    "repetition": {"repetition_penalty": 1.3},
    "frequency": {"frequency_penalty": 0.7, "top_k": 4},
    "presence": {"presence_penalty": 1.5, "top_k": 4},
    "bias": {"logit_bias": {7: 4.0, 200: 3.5, 9: -math.inf}},
    "bias as in JSON": {"logit_bias": {"7": 6}, "top_k": 3},
    "min_new_tokens": {"stop_token_ids": BANNED, "min_new_tokens": 6},
    "all": {
        "temperature": 0.8,
        "top_k": 30,
        "top_p": 0.92,
        "min_p": 0.01,
        "repetition_penalty": 0.8,
        "frequency_penalty": 0.4,
        "presence_penalty": -0.3,
        "logit_bias": {3: 5.0, 4: 5.0},
    },
}


def distributions(logits, prompt, output, params):
    """Log-probabilities of each kind, and the ids that can be drawn, written down from the definitions."""
    heat = params.get("temperature", 1.0)
    raw, sampling = logits.log_softmax(-1), (logits / heat).log_softmax(-1)
    row = logits.tolist()
    counts = Counter(output)
    for token in {*prompt, *output}:
        penalty = params.get("repetition_penalty", 1.0)
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token, times in counts.items():
        row[token] -= times * params.get("frequency_penalty", 0.0) + params.get("presence_penalty", 0.0)
    for token, bias in params.get("logit_bias", {}).items():
        row[int(token)] += bias
    if len(output) < params.get("min_new_tokens", 0):
        for token in params["stop_token_ids"]:
            row[token] = -math.inf
    weights = [math.exp((x - max(row)) / heat) for x in row]
    kept = sorted((t for t in range(len(row)) if weights[t] > 0), key=lambda t: (-weights[t], t))
    kept = kept[: params.get("top_k", len(row))]
    mass, nucleus = sum(weights[t] for t in kept), []
    for token in kept:
        if sum(weights[t] for t in nucleus) < params.get("top_p", 1.0) * mass:
            nucleus.append(token)
    kept = [t for t in nucleus if weights[t] >= params.get("min_p", 0.0) * weights[nucleus[0]]]
    total = sum(weights[t] for t in kept)
    processed = {t: math.log(weights[t] / total) for t in kept}
    return raw.tolist(), sampling.tolist(), processed


def logprobs(result, kind):
    name = "output_token_logprobs" + ("" if kind == "sampling" else f"_{kind}")
    return [value for value, _, _ in result["meta_info"][name]]


@pytest.mark.parametrize("name", CASES)
def test_each_kind_is_the_distribution_that_its_name_says(tiny, model, engine, name):
    """F1, F2: raw, sampling and processed agree with an independent float64 computation, and the mask names
    exactly the ids that could have been drawn."""
    params, prompt = CASES[name], tiny.prompt(9)
    results = engine.generate(
        input_ids=prompt,
        sampling_params={"n": 3, "seed": 1, "max_new_tokens": 10, **params},
        return_logprob=True,
        logprob_kinds=KINDS,
        return_sampling_mask=True,
    )
    for result in results:
        output = result["output_ids"]
        rows = tiny.logits(model, [*prompt, *output])[len(prompt) - 1 :]
        masks = result["meta_info"]["sampling_mask"]
        assert len(masks) == len(output)
        for at, token in enumerate(output):
            raw, sampling, processed = distributions(rows[at], prompt, output[:at], params)
            assert sorted(masks[at]) == sorted(processed)
            got = [logprobs(result, kind)[at] for kind in KINDS]
            assert got == pytest.approx([raw[token], sampling[token], processed[token]], abs=1e-5)


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p", "top_p before min_p"])
def test_processed_follows_from_the_mask(tiny, model, engine, name):
    """F2: a trainer that has only the mask and its own logits gets the processed logprob."""
    params, prompt = CASES[name], tiny.prompt(12)
    result = engine.generate(
        input_ids=prompt,
        sampling_params={"seed": 3, "max_new_tokens": 12, **params},
        return_logprob=True,
        logprob_kinds=["processed"],
        return_sampling_mask=True,
    )
    assert "output_token_logprobs" not in result["meta_info"]
    output = result["output_ids"]
    rows = tiny.logits(model, [*prompt, *output])[len(prompt) - 1 :] / params.get("temperature", 1.0)
    for at, kept in enumerate(result["meta_info"]["sampling_mask"]):
        expected = rows[at, output[at]] - rows[at, kept].logsumexp(0)
        assert logprobs(result, "processed")[at] == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "top_k": 12}, {"top_p": 0.6, "min_p": 0.02}])
def test_tokens_come_as_often_as_the_processed_distribution_says(tiny, model, engine, params):
    """F2: over 2000 samples the counts pass a chi-square test at five standard deviations."""
    prompt, count = tiny.prompt(5, seed=2), 2000
    results = engine.generate(
        input_ids=prompt, sampling_params={"n": count, "seed": 11, "max_new_tokens": 1, **params}
    )
    seen = Counter(result["output_ids"][0] for result in results)
    _, _, processed = distributions(tiny.logits(model, prompt)[-1], prompt, [], params)
    expected = {token: count * math.exp(value) for token, value in processed.items()}
    assert set(seen) <= set(expected)
    rare = [token for token, times in expected.items() if times < 8]
    bins = [(seen[token], times) for token, times in expected.items() if times >= 8]
    if sum(expected[token] for token in rare) > 1:
        bins.append((sum(seen[token] for token in rare), sum(expected[token] for token in rare)))
    statistic = sum((times - mean) ** 2 / mean for times, mean in bins)
    freedom = len(bins) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_greedy_takes_the_largest_adjusted_logit_and_reports_raw_logprobs(tiny, model, engine):
    """F3: at temperature 0 penalties and bias choose, filters don't, and all three kinds are the raw one."""
    prompt = tiny.prompt(9, seed=4)
    params = {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "logit_bias": {8: 2.0}}
    result = engine.generate(
        input_ids=prompt,
        sampling_params={"temperature": 0, "max_new_tokens": 15, "top_k": 2, "min_p": 0.9, **params},
        return_logprob=True,
        logprob_kinds=KINDS,
        return_sampling_mask=True,
    )
    output = result["output_ids"]
    rows = tiny.logits(model, [*prompt, *output])[len(prompt) - 1 :]
    for at, token in enumerate(output):
        raw, _, processed = distributions(rows[at], prompt, output[:at], params)
        assert token == max(processed, key=lambda t: processed[t])
        assert [logprobs(result, kind)[at] for kind in KINDS] == pytest.approx([raw[token]] * 3, abs=1e-5)
    assert result["meta_info"]["sampling_mask"] == [[token] for token in output]


def test_greedy_is_the_limit_of_small_temperatures(tiny, engine):
    """F3: down to the smallest temperature everything stays finite, and the tokens become the greedy ones."""
    prompt = tiny.prompt(9, seed=5)

    def ask(heat):
        params = {"temperature": heat, "max_new_tokens": 20}
        return engine.generate(
            input_ids=prompt, sampling_params=params, return_logprob=True, logprob_kinds=KINDS
        )

    greedy = ask(0)
    for heat in (1e-4, 1e-9, 1e-30, 5e-324):
        cold = ask(heat)
        assert cold["output_ids"] == greedy["output_ids"]
        for kind in KINDS:
            assert all(math.isfinite(value) for value in logprobs(cold, kind))


def test_greedy_takes_the_lowest_id_of_a_tie(tiny, make_engine):
    """F3: where all logits are equal the choice is the documented one."""
    model = tiny.model()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    engine = make_engine(model)
    params = {"temperature": 0, "max_new_tokens": 3}
    result = engine.generate(input_ids=[5, 6], sampling_params=params, return_logprob=True)
    assert result["output_ids"] == [0, 0, 0]
    assert logprobs(result, "sampling") == pytest.approx([-math.log(256)] * 3)


def test_top_and_chosen_ids_have_the_sampling_logprobs(tiny, model, engine):
    """F1: `top_logprobs_num` and `token_ids_logprob` read the distribution of the token's own logprob."""
    prompt, heat, ids = tiny.prompt(9), 0.6, [3, 250, 3]
    result = engine.generate(
        input_ids=prompt,
        sampling_params={"temperature": heat, "max_new_tokens": 8, "top_k": 3, "seed": 0},
        return_logprob=True,
        top_logprobs_num=5,
        token_ids_logprob=ids,
    )
    meta, output = result["meta_info"], result["output_ids"]
    rows = tiny.logits(model, [*prompt, *output])[len(prompt) - 1 : -1] / heat
    for at, row in enumerate(rows.log_softmax(-1)):
        values, best = row.topk(5)
        assert [token for _, token, _ in meta["output_top_logprobs"][at]] == best.tolist()
        assert [v for v, _, _ in meta["output_top_logprobs"][at]] == pytest.approx(values.tolist(), abs=1e-5)
        assert [token for _, token, _ in meta["output_token_ids_logprobs"][at]] == ids
        expected = pytest.approx(row[ids].tolist(), abs=1e-5)
        assert [value for value, _, _ in meta["output_token_ids_logprobs"][at]] == expected


def test_text_stands_beside_every_logprob_only_when_asked(tiny, engine):
    """F2: the third of each triple is the token's text with `return_text_in_logprobs`, else None."""
    fields = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
    params = {"logit_bias": {65: 1000.0, 66: 999.0}, "max_new_tokens": 2, "temperature": 0}
    shown = engine.generate("xy", params, return_text_in_logprobs=True, **fields)["meta_info"]
    assert [text for _, _, text in shown["output_token_logprobs"]] == ["A", "A"]
    assert [text for _, _, text in shown["input_token_logprobs"]] == ["x", "y"]
    bare = engine.generate("xy", params, **fields)["meta_info"]
    assert {text for top in bare["output_top_logprobs"] for _, _, text in top} == {None}
    assert {text for _, _, text in (*bare["output_token_logprobs"], *bare["input_token_logprobs"])} == {None}
