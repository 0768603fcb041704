"""Every field of a request reaches every sample of every prompt."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from tokenspeed_rl.requests import GenerateReqInput

PROMPTS = {"text": ["abcdef", "ghi"], "input_ids": [[97, 98, 99, 100, 101, 102], [103, 104, 105]]}
LOGPROB = {"return_logprob": True}


def triples(values):
    return all(len(triple) == 3 for triple in values)


CHECKS = {
    "rid": ({"rid": ["one", "two"]}, lambda m: m["id"] == ["one", "two"][m["prompt_index"]]),
    "return_logprob": (LOGPROB, lambda m: len(m["output_token_logprobs"]) == 4),
    "logprob_start_len": (
        {"logprob_start_len": 1, **LOGPROB},
        lambda m: len(m["input_token_logprobs"]) == [5, 2][m["prompt_index"]],
    ),
    "top_logprobs_num": (
        {"top_logprobs_num": 3, **LOGPROB},
        lambda m: [len(top) for top in m["output_top_logprobs"]] == [3] * 4,
    ),
    "token_ids_logprob": (
        {"token_ids_logprob": [7, 8], **LOGPROB},
        lambda m: [[i for _, i, _ in row] for row in m["output_token_ids_logprobs"]] == [[7, 8]] * 4,
    ),
    "logprob_kinds": (
        {"logprob_kinds": ["raw", "processed"], **LOGPROB},
        lambda m: (
            {name for name in m if name.startswith("output_token_logprobs")}
            == {"output_token_logprobs_raw", "output_token_logprobs_processed"}
        ),
    ),
    "return_text_in_logprobs": (
        {"return_text_in_logprobs": True, **LOGPROB},
        lambda m: all(isinstance(text, str) for _, _, text in m["output_token_logprobs"]),
    ),
    "return_sampling_mask": (
        {"return_sampling_mask": True},
        lambda m: [len(kept) for kept in m["sampling_mask"]] == [[6], [2]][m["prompt_index"]] * 4,
    ),
    "return_hidden_states": (
        {"return_hidden_states": True},
        lambda m: [len(row) for row in m["hidden_states"]] == [64] * 4,
    ),
    "stream": ({"stream": True}, lambda m: m["completion_tokens"] == 4),
    "priority": ({"priority": 3}, lambda m: m["completion_tokens"] == 4),
}
PARAMS = [{"n": 3, "max_new_tokens": 4, "top_k": 6}, {"n": 3, "max_new_tokens": 4, "top_k": 2}]
OF_EXPERTS = {"return_routed_experts"}
"""Of a model that has some: test_routed_experts.py."""


OF_ONE_SAMPLE = {"session_params"}
"""tests/lifecycle/test_sessions.py has it."""


def test_the_table_is_complete():
    """F8: by reflection: a new field of the request fails here until it is checked below."""
    names = {field.name for field in dataclasses.fields(GenerateReqInput)}
    elsewhere = {"lora"}  # needs a module with adapters: tests/protocol/test_lora.py
    assert names == {*PROMPTS, "sampling_params", *CHECKS, *elsewhere} | OF_EXPERTS | OF_ONE_SAMPLE


@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("name", CHECKS)
def test_a_field_survives_the_split(engine, prompts, name):
    """F8: two prompts of three samples, and all six results have what was asked for, in order."""
    fields, holds = CHECKS[name]
    obj = GenerateReqInput(**{prompts: PROMPTS[prompts]}, sampling_params=PARAMS, **fields)
    metas = [result["meta_info"] for result in engine.llm.generate(obj)]
    assert [(m["prompt_index"], m["index"]) for m in metas] == [(p, i) for p in (0, 1) for i in range(3)]
    assert [m["prompt_tokens"] for m in metas] == [6] * 3 + [3] * 3
    assert [holds(meta) for meta in metas] == [True] * 6


def test_hidden_states_are_the_models(tiny, model, engine):
    """F8: one vector per output token: the state behind the final norm that it was drawn from."""
    prompt = tiny.prompt(11)
    results = engine.generate(
        input_ids=prompt, sampling_params={"n": 2, "max_new_tokens": 4}, return_hidden_states=True
    )
    for result in results:
        logits = tiny.logits(model, [*prompt, *result["output_ids"]])[len(prompt) - 1 : -1]
        head = model.lm_head.weight.detach().double()
        for state, row in zip(result["meta_info"]["hidden_states"], logits.tolist(), strict=True):
            assert (head @ head.new_tensor(state)).tolist() == pytest.approx(row, abs=1e-4)


def test_a_higher_priority_is_admitted_first(tiny, make_engine):
    """F8: with room for one at a time the more urgent go first, and ties in order of arrival."""
    engine, ended = make_engine(tiny.model(), max_running_requests=1), []

    async def run(stream, number):
        async for _ in stream:
            ended.append(number)

    async def run_all(streams):
        await asyncio.gather(*(run(stream, number) for number, stream in enumerate(streams)))

    with tiny.held(engine):
        streams = [
            engine.client.generate_request(
                GenerateReqInput(input_ids=[5], sampling_params={"max_new_tokens": 5}, priority=priority)
            )
            for priority in (0, 0, 9, 1, 9)
        ]
    engine.llm.run(run_all(streams))
    assert ended == [2, 4, 3, 0, 1]
