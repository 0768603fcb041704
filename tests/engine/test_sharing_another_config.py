"""A module to share must be what the engine was made for, in the numbers too that no name or shape shows."""

from __future__ import annotations

import pytest
from peft import LoraConfig, get_peft_model

from tests.heads import Heads
from tokenspeed_rl.errors import ConfigError


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("moe", {"norm_topk_prob": True}, "renormalise=True"),
        ("moe", {"num_experts_per_tok": 2}, "per_token=2"),
        ("llama", {"rms_norm_eps": 0.1}, "rms_eps is 0.1"),
        ("llama", {"hidden_act": "gelu"}, "activation is 'gelu'"),
        ("llama", {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}, "num_heads is 8"),
        ("mistral", {"sliding_window": 3}, "windows is"),
    ],
)
def test_a_module_of_another_config_is_refused(tiny, make_engine, family, changes, named):
    own = {"sliding_window": None} if family == "mistral" else {}
    model = tiny.model(family, **own)
    engine, prompt = make_engine(model), tiny.prompt(9)
    with pytest.raises(ConfigError, match=named):
        engine.share_weights(tiny.model(family, seed=1, **{**own, **changes}))
    result = engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 4}, return_logprob=True)
    assert tiny.gap(model, prompt, result) < 1e-4


def test_hooks_of_a_peft_wrapper_are_seen_at_construction_and_later(tiny, make_engine):
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    module = get_peft_model(tiny.model(), lora)
    hook = module.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="PeftModel has a forward hook"):
        make_engine(module)
    hook.remove()
    engine = make_engine(module)
    module.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="PeftModel has a forward hook"):
        engine.weights_changed()


@pytest.mark.parametrize("reading", ["score", "values"])
def test_adapters_on_a_model_that_scores_are_refused(make_engine, reading):
    """Its requests name none, and scores of the base alone would not be the module's."""
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    with pytest.raises(ConfigError, match="LoRA adapters can't be shared"):
        make_engine(get_peft_model(Heads.model(reading), lora))
