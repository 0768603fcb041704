"""Engine.explain names the place, and the reason, of a difference that was put there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.tiny import Tiny
from tokenspeed_rl.errors import EngineShutdownError, EngineStateError, RequestError

PROMPT = Tiny.prompt(21)


def rollout(engine: Any, lora: str | None = None, **options: Any) -> dict[str, Any]:
    asked = {"temperature": 1.0, "seed": 5, "max_new_tokens": 12, **options}
    output: dict[str, Any] = engine.generate(
        input_ids=PROMPT, sampling_params=asked, return_logprob=True, lora=lora
    )
    return output


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_agreement(make_engine: Any, family: str) -> None:
    model = Tiny.model(family)
    engine = make_engine(model)
    found = engine.explain(rollout(engine), model)
    assert found.position is None and found.first_layer is None and not found.different_weights
    assert found.largest < 1e-4 and len(found.layers) == 3
    assert "agree" in str(found)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_weight_that_differs_is_named_with_its_layer(make_engine: Any, layer: int) -> None:
    model = Tiny.model()
    engine = make_engine(copy.deepcopy(model))
    output = rollout(engine)
    with torch.no_grad():
        model.model.layers[layer].mlp.down_proj.weight[3, 4] += 3.0
    found = engine.explain(output, model)

    whole = [*PROMPT, *output["output_ids"]]
    expected = Tiny.ref_logprobs(model, whole)[len(PROMPT) - 1 :]
    recorded = [value for value, _, _ in output["meta_info"]["output_token_logprobs"]]
    gaps = [abs(a - b) for a, b in zip(recorded, expected, strict=True)]
    at = next(i for i, gap in enumerate(gaps) if gap > 1e-4)
    assert found.position == at and found.token == output["output_ids"][at]
    assert found.largest == pytest.approx(max(gaps), abs=1e-5)
    assert found.trainer_logprob == pytest.approx(expected[at], abs=1e-5)
    assert found.rollout_logprob == pytest.approx(recorded[at])
    row = Tiny.logits(model, whole)[len(PROMPT) - 1 + at].log_softmax(-1)
    assert [token for _, token, _ in found.trainer_top] == row.topk(5).indices.tolist()
    assert [value for value, _, _ in found.trainer_top] == pytest.approx(
        row.topk(5).values.tolist(), abs=1e-5
    )
    assert list(found.different_weights) == [f"model.layers.{layer}.mlp.down_proj.weight"]
    assert "3" in next(iter(found.different_weights.values()))
    assert found.first_layer == ("layer 0" if layer == 0 else "layer 1, norm")
    assert f"output token {at}" in str(found)


def test_a_rollout_of_older_weights(make_engine: Any) -> None:
    old, new = Tiny.model(), Tiny.model(seed=1)
    engine = make_engine(copy.deepcopy(old).config, weight_version="old")
    engine.update_weights_from_tensor(dict(old.named_parameters()), weight_version="old")
    output = rollout(engine)
    engine.update_weights_from_tensor(dict(new.named_parameters()), weight_version="new")
    found = engine.explain(output, new)
    assert found.position == 0 and (found.sampled_under, found.engine_version) == ("old", "new")
    assert found.first_layer is None and not found.different_weights
    assert found.engine_logprob == pytest.approx(found.trainer_logprob, abs=1e-4)
    assert any("'old'" in note and "'new'" in note for note in found.notes)


def test_the_temperature_is_the_callers_to_say(make_engine: Any) -> None:
    model = Tiny.model()
    engine = make_engine(model)
    output = rollout(engine, temperature=0.5)
    assert engine.explain(output, model, temperature=0.5).position is None
    found = engine.explain(output, model)
    assert found.position is not None and found.first_layer is None
    assert any("temperature" in note for note in found.notes)


def test_without_logprobs_the_engine_is_recomputed(make_engine: Any) -> None:
    model = Tiny.model()
    engine = make_engine(copy.deepcopy(model))
    output = engine.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 3})
    found = engine.explain(output, model)
    assert found.position is None and found.unrecorded
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    found = engine.explain(output, model)
    assert found.position == 0 and found.rollout_logprob is None
    assert found.first_layer == "layer 1, norm" and list(found.different_weights) == ["model.norm.weight"]


def test_an_unrecorded_rollout_of_older_weights_is_not_said_to_agree(make_engine: Any) -> None:
    """Without logprobs of the rollout nothing says what it was sampled with: no claim is made about it."""
    model = Tiny.model()
    engine = make_engine(model, weight_version="old")
    outputs = [
        engine.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 3}),
        engine.generate(
            input_ids=PROMPT,
            sampling_params={"max_new_tokens": 3},
            return_logprob=True,
            logprob_kinds=("raw",),
        ),
    ]
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    engine.weights_changed("new")
    for output in outputs:
        said = str(engine.explain(output, model))
        assert "Rollout and trainer agree" not in said and "return_logprob=True" in said
        assert "'old'" in said and "'new'" in said


def test_another_adapter_and_another_dtype_are_named(make_engine: Any) -> None:
    """The two commonest reasons that no weight update mends."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(Tiny.model(), config, adapter_name="policy")
    model.add_adapter("other", config)
    engine = make_engine(model)
    output = engine.generate(
        input_ids=PROMPT, sampling_params={"max_new_tokens": 3}, return_logprob=True, lora="policy"
    )
    assert "the module adds" not in str(engine.explain(output, model))
    model.set_adapter("other")
    said = str(engine.explain(output, model))
    assert "adapter 'policy', but the module adds adapter 'other'" in said
    with model.disable_adapter():
        assert "the module adds no adapter" in str(engine.explain(output, model))
    plain = Tiny.model()
    half = make_engine(plain)
    said = str(half.explain(rollout(half), copy.deepcopy(plain).bfloat16()))
    assert "bfloat16" in said and "float32" in said


def adapted() -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(Tiny.model(), config, adapter_name="policy")
    model.add_adapter("other", config)
    return model


def test_a_scaling_changed_without_weights_changed_is_named_with_its_layer(make_engine: Any) -> None:
    """An adapter's scaling is no parameter, but as good as one: no other computation is to blame."""
    model = adapted()
    engine = make_engine(model)
    output = rollout(engine, lora="policy")
    assert not engine.explain(output, model).different_scalings
    model.base_model.model.model.layers[1].self_attn.v_proj.scaling["policy"] *= 8
    found = engine.explain(output, model)
    expected = Tiny.ref_logprobs(model, [*PROMPT, *output["output_ids"]])[len(PROMPT) - 1 :]
    assert found.position is not None and not found.different_weights
    assert found.trainer_logprob == pytest.approx(expected[found.position], abs=1e-5)
    name = "model.layers.1.self_attn.v_proj.scaling.policy"
    assert found.different_scalings == {name: "4 here, 32.0 in the module"}
    said = str(found)
    assert "scaling differs in 1 of its layers: weights_changed()" in said and f"scaling {name}: 4" in said
    assert "another computation" not in said
    engine.weights_changed()
    assert engine.explain(rollout(engine, lora="policy"), model).position is None


def test_the_scaling_of_another_adapter_is_no_reason(make_engine: Any) -> None:
    """Nor is any for the base model: what really differs is still called another computation."""
    model = adapted()
    engine = make_engine(model)
    output, base = rollout(engine, lora="policy"), rollout(engine)
    for layer in model.base_model.model.model.layers:
        layer.self_attn.q_proj.scaling["other"] *= 8
    assert engine.explain(output, model).position is None
    model.base_model.model.model.norm.variance_epsilon = 10.0
    found = engine.explain(output, model)
    assert not found.different_scalings and "another computation" in str(found)
    with model.disable_adapter():
        found = engine.explain(base, model)
    assert not found.different_scalings and "another computation" in str(found)


def test_module_engine_and_random_state_stay_as_they_are(make_engine: Any) -> None:
    model = Tiny.model(attention_dropout=0.5)
    model.train()
    model.model.layers[0].eval()
    engine = make_engine(copy.deepcopy(model))
    output = rollout(engine)
    modes, state = [part.training for part in model.modules()], torch.get_rng_state()
    before = Tiny.state(engine)["pages"]
    found = engine.explain(output, model)
    assert found.position is None  # dropout would differ
    assert [part.training for part in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert Tiny.state(engine)["pages"] == before
    Tiny.all_back(engine)


def test_it_runs_while_paused_and_with_the_cache_asleep(make_engine: Any) -> None:
    model = Tiny.model()
    engine = make_engine(model)
    output = rollout(engine)
    engine.pause()
    engine.release_memory_occupation("kv_cache")
    assert engine.explain(output, model).position is None


def test_what_is_refused(make_engine: Any) -> None:
    model = Tiny.model()
    engine = make_engine(copy.deepcopy(model))
    output = rollout(engine)
    with pytest.raises(RequestError, match="one result"):
        engine.explain([output], model)
    with pytest.raises(RequestError, match="no token"):
        engine.explain(rollout(engine, max_new_tokens=0), model)
    messages = list(engine.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 3}, stream=True))
    with pytest.raises(RequestError, match="whole result"):
        engine.explain(messages[-1], model)
    with pytest.raises(RequestError, match="temperature"):
        engine.explain(output, model, temperature=-1.0)
    with pytest.raises(RequestError, match="architecture"):
        engine.explain(output, Tiny.model(num_hidden_layers=3))
    with pytest.raises(RequestError, match="causal LM"):
        engine.explain(output, model.model)
    engine.release_memory_occupation("weights")
    with pytest.raises(EngineStateError, match="weights"):
        engine.explain(output, model)
    engine.shutdown()
    with pytest.raises(EngineShutdownError):
        engine.explain(output, model)
