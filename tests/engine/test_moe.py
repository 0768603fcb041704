"""Mixtures of experts are served, updated, released and woken like any other model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.errors import WeightsInvalidError
from tokenspeed_rl.weights import checksum

FAMILIES = ("moe", "mixtral")
PROMPTS = [Tiny.prompt(length, seed=length) for length in (1, 17, 40)]
GREEDY = {"temperature": 0, "max_new_tokens": 16}


def generated(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16)
    return found[0].tolist()[len(prompt) :]


def check(model: PreTrainedModel, engine: Engine, prompts: list[list[int]] = PROMPTS) -> None:
    """Logprobs of samples to 1e-4, and greedy ids as transformers' `generate` gives them, in one batch."""
    sampled = engine.generate(
        input_ids=prompts, sampling_params={"n": 2, "max_new_tokens": 16}, return_logprob=True
    )
    for at, result in enumerate(sampled):
        assert Tiny.gap(model, prompts[at // 2], result) < 1e-4
    greedy = engine.generate(input_ids=prompts, sampling_params=GREEDY, return_logprob=True)
    for prompt, result in zip(prompts, greedy, strict=True):
        assert Tiny.gap(model, prompt, result) < 1e-4 and result["output_ids"] == generated(model, prompt)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("source", ["live", "directory"])
def test_live_and_from_a_directory(
    make_engine: Callable[..., Engine], tmp_path: Any, family: str, tied: bool, source: str
) -> None:
    """Issue 4, item 3: engine logprobs == transformers, and greedy ids == its `generate`."""
    model = Tiny.model(family, tie_word_embeddings=tied)
    if source == "directory":
        model.save_pretrained(tmp_path)
    check(model, make_engine(model if source == "live" else tmp_path))


@pytest.mark.parametrize(
    "options",
    [
        {"mlp_only_layers": [1], "norm_topk_prob": True},
        {"decoder_sparse_step": 2, "num_experts": 3, "num_experts_per_tok": 1},
    ],
)
def test_dense_layers_and_renormalised_weights(
    make_engine: Callable[..., Engine], options: dict[str, Any]
) -> None:
    """Issue 4, item 3: what a config of Qwen3-MoE chooses."""
    model = Tiny.model("moe", **options)
    check(model, make_engine(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_from_a_config(make_engine: Callable[..., Engine], family: str) -> None:
    """Issue 4, item 3: seeded random weights of the config's deviation, which transformers can load."""
    config = Tiny.config(family)
    engine = make_engine(config, seed=3)
    weights = dict(engine.named_parameters())
    for name, tensor in weights.items():
        if "experts" in name or ".gate." in name:
            assert 0.8 < tensor.std() / config.initializer_range < 1.25 and abs(tensor.mean()) < 0.02
    model = AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(weights)
    check(model, engine)
    assert engine.weights_checksum() == make_engine(config, seed=3).weights_checksum()
    assert engine.weights_checksum() != make_engine(config, seed=4).weights_checksum()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {"chunked_prefill_size": 5, "page_size": 4},
        {"enable_prefix_caching": False, "max_running_requests": 2},
        {"page_size": 1, "max_total_tokens": 80},
    ],
)
def test_any_batch_composition(
    make_engine: Callable[..., Engine], family: str, options: dict[str, Any]
) -> None:
    """Contract 9: chunks, caches and retractions change no token's experts: == transformers, == alone."""
    model = Tiny.model(family)
    engine, prompts = make_engine(model, **options), [*PROMPTS, *PROMPTS[1:]]
    check(model, engine, prompts)
    together = engine.generate(input_ids=prompts, sampling_params=GREEDY)
    for prompt, result in zip(prompts, together, strict=True):
        assert engine.generate(input_ids=prompt, sampling_params=GREEDY)["output_ids"] == result["output_ids"]


def test_half_precision(make_engine: Callable[..., Engine], tmp_path: Any) -> None:
    """Contract 7: bfloat16 as the model's own dtype; asked for float32 it is cast once, and exact."""
    model = Tiny.model("moe").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    half, whole = make_engine(tmp_path), make_engine(tmp_path, dtype="float32")
    assert {tensor.dtype for _, tensor in half.named_parameters()} == {torch.bfloat16}
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    params = {"max_new_tokens": 10}
    results = [
        e.generate(input_ids=PROMPTS[1], sampling_params=params, return_logprob=True) for e in (half, whole)
    ]
    assert Tiny.gap(reference, PROMPTS[1], results[0]) < 0.5
    assert Tiny.gap(reference, PROMPTS[1], results[1]) < 1e-4


@pytest.mark.parametrize("backup", ["none", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_released_woken_and_updated(
    make_engine: Callable[..., Engine], tmp_path: Any, family: str, backup: str
) -> None:
    """Contract 5 and 6: experts go with the tag `weights`, come back out of the backup or with an update, at
    the addresses they had."""
    models = [Tiny.model(family, seed=seed) for seed in range(2)]
    models[0].save_pretrained(tmp_path)
    engine = make_engine(tmp_path, weights_backup=backup)
    places = {name: tensor.data_ptr() for name, tensor in engine.named_parameters()}
    check(models[0], engine)
    engine.release_memory_occupation()
    assert engine.memory_report()["weights"]["mapped"] == 0
    engine.resume_memory_occupation()
    if backup == "cpu":
        check(models[0], engine)
    else:
        with pytest.raises(WeightsInvalidError):
            engine.generate(input_ids=[1])
    engine.update_weights_from_tensor(models[1].named_parameters(), weight_version="w1")
    check(models[1], engine)
    assert engine.weights_checksum() == checksum(models[1].named_parameters())
    assert places == {name: tensor.data_ptr() for name, tensor in engine.named_parameters()}


def test_explained(make_engine: Callable[..., Engine]) -> None:
    """Issue 4, item 8: a mixture's rollout agrees with its module, and an expert that doesn't is named."""
    model = Tiny.model("moe")
    engine = make_engine(model.config)
    engine.update_weights_from_tensor(dict(model.named_parameters()))
    params = {"max_new_tokens": 12}
    output = engine.generate(input_ids=PROMPTS[1], sampling_params=params, return_logprob=True)
    assert engine.explain(output, model).position is None
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[:, 0] += 0.5
    found = engine.explain(output, model)
    assert list(found.different_weights) == ["model.layers.1.mlp.experts.down_proj"]
    assert found.position is not None and found.first_layer == "layer 1, norm"
