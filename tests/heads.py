"""Tiny models with a head that scores, and the reference: transformers on each prompt alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from tests.tiny import Tiny

AUTO = {
    "embedding": AutoModelForCausalLM,
    "score": AutoModelForSequenceClassification,
    "values": AutoModelForTokenClassification,
}
EXACT = 1e-5


class Heads:
    """What the tests of readings build and compare with, under one name."""

    @staticmethod
    def model(reading: str, family: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
        """Random weights, biases and norms included; one label unless `changes` has `num_labels`."""
        config = Tiny.config(family, **{"num_labels": 1, **changes})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AUTO[reading].from_config(config).eval()
            for name, parameter in model.named_parameters():
                if "norm" in name or "bias" in name:
                    torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
        return model

    @staticmethod
    @torch.no_grad()
    def expected(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
        """The embedding [hidden] or, by transformers, the score [labels] or values [tokens, labels]; a last
        dimension of one label is dropped."""
        tokens = torch.tensor([list(ids)])
        if "CausalLM" in type(model).__name__:
            hidden = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state[0, -1]
            return hidden.float() / hidden.float().norm()
        logits = model(input_ids=tokens, use_cache=False).logits[0].float()
        return logits[..., 0] if model.config.num_labels == 1 else logits

    @staticmethod
    def gap(model: PreTrainedModel, ids: Sequence[int], result: dict[str, Any]) -> float:
        """Largest difference of a reading from the reference's, whose shape it must have."""
        (read,) = (result[name] for name in ("embedding", "score") if name in result)
        assert result["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        assert result["meta_info"]["prompt_tokens"] == len(ids)
        found, expected = torch.tensor(read), Heads.expected(model, ids)
        assert found.shape == expected.shape
        return (found - expected).abs().max().item()

    @staticmethod
    def check(model: PreTrainedModel, engine: Any, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """Every prompt of one call is read as transformers reads it alone; returns the results."""
        results: list[dict[str, Any]] = engine.encode(input_ids=prompts)
        for prompt, result in zip(prompts, results, strict=True):
            assert Heads.gap(model, prompt, result) < EXACT
        return results

    @staticmethod
    def named(model: PreTrainedModel) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    @staticmethod
    def train(model: PreTrainedModel, seed: int = 0, scale: float = 0.05) -> None:
        """Write other weights in place, as an optimiser does."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
