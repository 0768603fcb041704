"""Plain numbers of a shared module by which it computes: changed before sharing or after, they are refused by
name, and only then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.heads import Heads
from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.errors import ConfigError, WeightsInvalidError

PROMPT = Tiny.prompt(9)
NUMBERS = [
    ("moe", "model.layers.1.mlp.gate", "top_k", 2, "3"),
    ("moe", "model.layers.0.mlp.gate", "norm_topk_prob", True, "False"),
    ("mixtral", "model.layers.0.mlp.gate", "top_k", 1, "2"),
    ("llama", "model.layers.1.self_attn", "scaling", 0.3, "0.25"),
    ("qwen2", "model.layers.0.self_attn", "is_causal", False, "True"),
    ("llama", "model.norm", "variance_epsilon", 0.1, "1e-06"),
    ("mistral", "model.layers.0.post_attention_layernorm", "variance_epsilon", 0.1, "1e-06"),
    ("qwen3", "model.layers.1.self_attn.k_norm", "variance_epsilon", 0.1, "1e-06"),
    ("llama", "model.rotary_emb", "attention_scaling", 1.5, "1.0"),
    ("llama", "model.embed_tokens", "max_norm", 0.1, "None"),
]
CONFIGURED: list[tuple[str, dict[str, Any], Callable[[Any], None], str]] = [
    ("mistral", {"sliding_window": None}, lambda c: setattr(c, "sliding_window", 3), "windows is"),
    (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0},
        lambda c: c.layer_types.__setitem__(0, "full_attention"),
        "windows is",
    ),
    ("llama", {}, lambda c: setattr(c, "num_hidden_layers", 1), "num_layers is 1"),
]


def generated(engine: Engine) -> dict[str, Any]:
    result: dict[str, Any] = engine.generate(
        input_ids=PROMPT, sampling_params={"max_new_tokens": 4}, return_logprob=True
    )
    return result


@pytest.mark.parametrize(("family", "name", "attribute", "value", "right"), NUMBERS)
def test_a_changed_number_is_refused_at_construction(
    make_engine: Callable[..., Engine], family: str, name: str, attribute: str, value: Any, right: str
) -> None:
    """It says which module, what it has, what the engine has, and what to do."""
    model = Tiny.model(family)
    setattr(model.get_submodule(name), attribute, value)
    with pytest.raises(ConfigError) as caught:
        make_engine(model)
    said = str(caught.value)
    assert f"{name}.{attribute} is {value}, not the engine's {right}" in said
    assert "undo what was changed" in said


@pytest.mark.parametrize(("family", "name", "attribute", "value", "right"), NUMBERS)
def test_a_number_changed_later_is_refused_until_it_is_undone(
    make_engine: Callable[..., Engine], family: str, name: str, attribute: str, value: Any, right: str
) -> None:
    """As a hook is: `weights_changed` says so, nothing is sampled meanwhile, and the old number is right
    again. Transformers' own forward shows that the number counts."""
    model = Tiny.model(family)
    engine, logits = make_engine(model), Tiny.logits(model, PROMPT)
    module, embedding = model.get_submodule(name), model.model.embed_tokens.weight.detach().clone()
    before = getattr(module, attribute)
    setattr(module, attribute, value)
    assert not torch.allclose(Tiny.logits(model, PROMPT), logits, atol=1e-3)
    with pytest.raises(ConfigError, match=rf"{name}\.{attribute} is {value}, not the engine's {right}"):
        engine.weights_changed()
    with pytest.raises(WeightsInvalidError, match=attribute):
        generated(engine)
    setattr(module, attribute, before)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embedding)  # a `max_norm` writes it
    engine.weights_changed()
    assert Tiny.gap(model, PROMPT, generated(engine)) < 1e-4


@pytest.mark.parametrize(("family", "own", "change", "named"), CONFIGURED)
def test_a_config_that_forwards_read_is_looked_at_again(
    make_engine: Callable[..., Engine],
    family: str,
    own: dict[str, Any],
    change: Callable[[Any], None],
    named: str,
) -> None:
    """Windows and layers are not kept in the modules: transformers takes them from the config each time."""
    model = Tiny.model(family, **own)
    engine, logits = make_engine(model), Tiny.logits(model, PROMPT)
    change(model.config)
    assert not torch.allclose(Tiny.logits(model, PROMPT), logits, atol=1e-3)
    with pytest.raises(ConfigError, match=f"its config's {named}"):
        engine.weights_changed()
    with pytest.raises(WeightsInvalidError):
        generated(engine)


def test_numbers_that_change_no_value_are_accepted(make_engine: Callable[..., Engine]) -> None:
    """Dropout, jitter and gradient checkpointing belong to training."""
    model = Tiny.model("mixtral")
    engine = make_engine(model)
    model.model.layers[0].self_attn.attention_dropout = 0.5
    model.model.layers[0].mlp.jitter_noise = 0.1
    model.gradient_checkpointing_enable()
    engine.weights_changed()
    assert Tiny.gap(model, PROMPT, generated(engine)) < 1e-4


def test_adapters_added_later_to_a_model_that_scores_are_refused(make_engine: Callable[..., Engine]) -> None:
    """As at construction: its requests name none."""
    model = Heads.model("score")
    engine = make_engine(model)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    with pytest.raises(ConfigError, match="LoRA adapters can't be shared"):
        engine.weights_changed()
