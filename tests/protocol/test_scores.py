"""Members of the protocol that read instead of generate, by their effect."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.heads import EXACT, Heads
from tokenspeed_rl import AsyncLLM, Engine
from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.requests import EmbeddingReqInput, GenerateReqInput

PROMPTS = [[5, 6, 7], [9, 9, 8, 1, 2]]


@pytest.mark.parametrize("reading", ["embedding", "score", "values"])
def test_generate_request(reading: str) -> None:
    """Contract 2, 3: `generate_request(EmbeddingReqInput)` yields one result, of several event loops at once;
    `is_generation` says whether the model also generates."""
    model = Heads.model(reading)

    async def ask(client: AsyncLLM, prompts: Any) -> list[Any]:
        return [result async for result in client.generate_request(EmbeddingReqInput(input_ids=prompts))]

    with Engine(model, max_total_tokens=512) as engine:
        (single,) = asyncio.run(ask(engine.client, PROMPTS[0]))
        (both,) = engine.llm.run(ask(engine.client, PROMPTS))
        for prompt, result in zip([PROMPTS[0], *PROMPTS], [single, *both], strict=True):
            assert Heads.gap(model, prompt, result) < EXACT
        assert engine.client.is_generation is (reading == "embedding")
        if reading != "embedding":
            with pytest.raises(RequestError, match="doesn't generate"):
                engine.client.generate_request(GenerateReqInput(input_ids=[1]))


@pytest.mark.parametrize("reading", ["embedding", "score", "values"])
def test_encode_and_the_facade(reading: str) -> None:
    """Contract 1, 7: `Engine.encode`, `LLM.generate` and `AsyncLLM.generate` give the same."""
    model = Heads.model(reading)
    with Engine(model, max_total_tokens=512) as engine:
        obj = EmbeddingReqInput(input_ids=PROMPTS[1])
        results = [
            engine.encode(input_ids=PROMPTS[1]),
            engine.llm.generate(obj),
            engine.llm.run(engine.client.generate(obj, timeout=20)),
            *engine.llm.generate_stream(obj),  # type: ignore[arg-type]
        ]
        assert len(results) == 4
        assert all(Heads.gap(model, PROMPTS[1], result) < EXACT for result in results)
