"""The `lora` field of a request, through the protocol: the base model, or an adapter of a PEFT module."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from peft import LoraConfig, PeftModel, get_peft_model

from tests.tiny import Tiny
from tokenspeed_rl import AsyncLLM, EngineClient
from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.requests import GenerateReqInput

GREEDY = {"temperature": 0, "max_new_tokens": 6}
PROMPTS = [Tiny.prompt(5), Tiny.prompt(9, seed=1)]


@pytest.fixture(scope="module")
def module() -> PeftModel:
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    return get_peft_model(Tiny.model(), config, adapter_name="policy").eval()


@pytest.fixture(scope="module")
def client(module: PeftModel) -> Iterator[EngineClient]:
    made = AsyncLLM(module, max_total_tokens=1024)
    yield made
    made.shutdown()


def ask(client: EngineClient, **fields: Any) -> Any:
    async def run() -> Any:
        return [message async for message in client.generate_request(GenerateReqInput(**fields))]

    return asyncio.run(run())


def greedy(module: PeftModel, prompt: list[int]) -> list[int]:
    """What the module itself goes on with, as it computes now."""
    ids = list(prompt)
    while len(ids) < len(prompt) + GREEDY["max_new_tokens"]:
        ids.append(int(Tiny.logits(module, ids)[-1].argmax()))
    return ids[len(prompt) :]


def test_lora_chooses_what_is_computed(client: EngineClient, module: PeftModel) -> None:
    """H13: None is the base model, also where an adapter is active in the module; a name is that adapter, for
    every prompt and sample of the request."""
    adapted = [greedy(module, prompt) for prompt in PROMPTS]
    with module.disable_adapter():
        plain = [greedy(module, prompt) for prompt in PROMPTS]
    assert adapted[0] != plain[0] and adapted[1] != plain[1]
    for lora, expected in (("policy", adapted), (None, plain)):
        params = {**GREEDY, "n": 2}
        [results] = ask(client, input_ids=PROMPTS, sampling_params=params, lora=lora)
        assert [result["output_ids"] for result in results] == [e for each in expected for e in (each, each)]


def test_lora_in_a_stream(client: EngineClient, module: PeftModel) -> None:
    """H13: a stream's deltas are the adapter's."""
    messages = ask(client, input_ids=PROMPTS[0], sampling_params=GREEDY, lora="policy", stream=True)
    assert [token for message in messages for token in message["output_ids"]] == greedy(module, PROMPTS[0])


@pytest.mark.parametrize("lora", ["", "polic", "default", "None", 3, ["policy"]])
def test_an_adapter_that_is_not_there(client: EngineClient, lora: Any) -> None:
    """Bad input: refused before anything is queued, with the names that there are."""
    with pytest.raises(RequestError) as caught:
        client.generate_request(GenerateReqInput(input_ids=[1], lora=lora))
    if isinstance(lora, str) and lora:
        assert "it has 'policy'" in str(caught.value) and repr(lora) in str(caught.value)


def test_the_state_has_names_and_ranks(client: EngineClient, module: PeftModel) -> None:
    """Issue 4: `get_internal_state` says which adapters there are."""
    [state] = asyncio.run(client.get_internal_state())
    size = sum(param.nbytes for name, param in module.named_parameters() if "lora_" in name)
    assert state["adapters"] == {"policy": {"ranks": [4], "bytes": size}}
