"""What a transformers config says is read right, and what would change the computation is refused by name."""

import inspect

import pytest
import torch
import transformers
from transformers import AutoConfig, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.models import FAMILIES, module_classes, slots, spec_from_config


def test_numbers_are_read():
    """Sizes, head dim, biases, windows and tying come from where transformers takes them."""
    spec = spec_from_config(
        Qwen2Config(
            vocab_size=300,
            hidden_size=96,
            intermediate_size=200,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=50,
            max_window_layers=2,
            max_position_embeddings=1234,
        )
    )
    assert (spec.architecture, spec.vocab_size, spec.hidden_size) == ("Qwen2ForCausalLM", 300, 96)
    assert (spec.intermediate_size, spec.num_layers, spec.num_heads, spec.num_kv_heads) == (200, 3, 6, 2)
    assert (spec.head_dim, spec.rms_eps, spec.tied, spec.max_position) == (16, 1e-5, True, 1234)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm) == (True, False, False, False)
    assert spec.windows == (None, None, 50)


def test_a_config_written_as_a_file(tmp_path):
    """A config that went through config.json gives the same spec."""
    config = Qwen3Config(architectures=["Qwen3ForCausalLM"], num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    assert spec_from_config(AutoConfig.from_pretrained(tmp_path)) == spec_from_config(config)


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (
            GPT2Config,
            {},
            ["gpt2", "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"],
        ),
        (GPT2Config, {"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "Qwen3ForCausalLM"]),
        (
            LlamaConfig,
            {"architectures": ["LlamaForQuestionAnswering"]},
            ["LlamaForQuestionAnswering", "ForSequenceClassification"],
        ),
        (LlamaConfig, {"architectures": ["MyForCausalLM"]}, ["MyForCausalLM"]),
        (LlamaConfig, {"architectures": ["Qwen2ForSequenceClassification"]}, ["Qwen2ForSeq"]),
        (
            LlamaConfig,
            {"architectures": ["LlamaForTokenClassification"], "id2label": {}},
            ["num_labels must be at least 1"],
        ),
        (LlamaConfig, {"hidden_act": "tanh"}, ["hidden_act='tanh'", "silu"]),
        (LlamaConfig, {"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
        (LlamaConfig, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
        (LlamaConfig, {"head_dim": 15}, ["head_dim=15 is odd"]),
        (LlamaConfig, {"num_key_value_heads": 5}, ["num_attention_heads=32", "num_key_value_heads=5"]),
        (LlamaConfig, {"is_causal": False}, ["is_causal=False"]),
        (MistralConfig, {"sliding_window": 0}, ["sliding_window=0"]),
        (Qwen2Config, {"layer_types": ["full_attention", "chunked_attention"]}, ["chunked_attention"]),
        (Qwen2Config, {"layer_types": ["sliding_attention"] * 2}, ["without a sliding_window"]),
    ],
)
def test_refusals(config, changes, words):
    """Anything unsupported raises ConfigError, naming it and what is supported."""
    config = config(num_hidden_layers=2)
    for name, value in changes.items():  # transformers itself refuses some at construction
        object.__setattr__(config, name, value)
    with pytest.raises(ConfigError) as error:
        spec_from_config(config)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("parameters", "word"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "rope_type='longrope'"),
        ({"full_attention": {"rope_type": "default", "rope_theta": 1e4}}, "differ by layer type"),
        ({"rope_type": "default", "partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25"),
    ],
)
def test_rope_refusals(parameters, word):
    """Rope variants that aren't there are refused, whatever the config class lets through."""
    config = Qwen2Config(num_hidden_layers=1)
    config.rope_parameters = parameters
    with pytest.raises(ConfigError, match=word):
        spec_from_config(config)


def test_all_faults_at_once():
    """One error names every fault, so that a user repairs a config in one go."""
    with pytest.raises(ConfigError) as error:
        spec_from_config(LlamaConfig(hidden_act="tanh", is_causal=False, partial_rotary_factor=0.5))
    assert all(word in str(error.value) for word in ("hidden_act", "is_causal", "partial_rotary_factor"))


HEADS = {
    "causal": (transformers.AutoModelForCausalLM, {}),
    "sequence": (transformers.AutoModelForSequenceClassification, {"num_labels": 1}),
    "token": (transformers.AutoModelForTokenClassification, {"num_labels": 3}),
    "token, no bias": (
        transformers.AutoModelForTokenClassification,
        {"num_labels": 1, "token_classification_bias": False},
    ),
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", HEADS)
def test_slots_are_the_parameters(family, tied, head):
    """Every parameter of the transformers model has its slot part, of its shape, once; tied heads none."""
    auto, options = HEADS[head]
    config = transformers.CONFIG_MAPPING[family.model_type](
        vocab_size=50,
        hidden_size=24,
        intermediate_size=36,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
        tie_word_embeddings=tied,
        **options,
    )
    with torch.device("meta"):
        model = auto.from_config(config)
    spec = spec_from_config(config, live=type(model).__name__)
    assert spec.architecture == type(model).__name__ and spec.head.generates == (head == "causal")
    parts = [part for slot in slots(spec) for part in slot.parameters]
    assert {part.hf_name: part.shape for part in parts} == {
        n: tuple(p.shape) for n, p in model.named_parameters()
    }
    names = [part.hf_name for part in parts]
    assert len(set(names)) == len(names)


def test_the_head_is_what_architectures_or_a_live_class_say():
    """A config names its class; a live module is what it is, whatever its config names."""

    def spec(*architectures, live=""):
        return spec_from_config(LlamaConfig(architectures=list(architectures) or None, num_labels=4), live)

    assert spec().head.reading == spec("LlamaForCausalLM").head.reading == "embedding"
    rewards = spec("LlamaForSequenceClassification")
    assert (rewards.head.reading, rewards.head.labels, rewards.head.bias) == ("score", 4, False)
    values = spec("LlamaForCausalLM", live="LlamaForTokenClassification")
    assert (values.head.reading, values.head.labels, values.head.bias) == ("values", 4, True)
    assert spec("LlamaForTokenClassification", live="SomethingElse") == values


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("head", HEADS)
def test_classes_are_those_of_transformers(family, head):
    """The classes that a live model may consist of are the ones transformers builds it from."""
    dense = {"mlp_only_layers": [0]} if family.model_type == "qwen3_moe" else {}
    config = transformers.CONFIG_MAPPING[family.model_type](num_hidden_layers=2, **dense)
    with torch.device("meta"):
        model = HEADS[head][0].from_config(config)
    own = {
        type(module)
        for module in model.modules()
        if type(module).__module__.startswith("transformers.models")
    }
    assert {cls.__name__ for cls in own} == module_classes(type(model).__name__)
    assert all(inspect.getmodule(cls) is inspect.getmodule(type(model)) for cls in own)
