"""Rope tables are those of transformers, bit for bit, from any spelling of the config."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tokenspeed_rl.layers.rope import RopeTable
from tokenspeed_rl.models import spec_from_config

CPU = torch.device("cpu")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS = {
    "default": {},
    "theta": {"rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": YARN,
    "yarn, original context from the config": {"rope_type": "yarn", "factor": 4.0},
    "yarn, attention_factor": {**YARN, "attention_factor": 0.9},
    "yarn, mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    "yarn, betas": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, factor 1": {**YARN, "factor": 1.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 64},
    "llama3, original context from the config": LLAMA3,
    "llama3, long": {**LLAMA3, "original_max_position_embeddings": 8192, "factor": 32.0, "rope_theta": 5e5},
}
SPELLINGS = {
    "rope_scaling with type": {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "rope_scaling with rope_type": {
        "rope_theta": 5000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "rope_parameters": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
    "nothing": {},
    "rope_theta alone": {"rope_theta": 777.0},
}


def config(**options):
    return LlamaConfig(hidden_size=96, num_attention_heads=4, max_position_embeddings=256, **options)


def assert_same_angles(settings):
    rotary = LlamaRotaryEmbedding(settings)
    positions = torch.arange(256)[None]
    cos, sin = rotary(torch.zeros(1), positions)
    table = RopeTable(spec_from_config(settings).rope).cos_sin(256, CPU)
    half = cos.shape[-1] // 2
    assert torch.equal(table, torch.cat((cos[0, :, :half], sin[0, :, :half]), 1))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dim", [24, 64, 128])
def test_equals_transformers_bit_for_bit(name, dim):
    """cos and sin of every variant, attention scaling included, are the trainer's."""
    parameters = {"rope_theta": 10000.0, "rope_type": "default", **VARIANTS[name]}
    assert_same_angles(config(head_dim=dim, rope_parameters=parameters))


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_of_the_config(name):
    """Old and new names of the same settings mean the same."""
    assert_same_angles(config(**SPELLINGS[name]))


def test_the_table_grows_as_needed():
    """A short context doesn't pay for the longest; growing changes no angle."""
    table = RopeTable(spec_from_config(LlamaConfig(max_position_embeddings=1_000_000)).rope)
    short = table.cos_sin(5, CPU)
    assert len(short) <= 2048 and table.cos_sin(len(short), CPU) is short
    long = table.cos_sin(len(short) + 1, CPU)
    assert len(long) < 10_000 and torch.equal(long[: len(short)], short)


def test_dynamic_stretches_no_further_than_the_model():
    """Past its positions, dynamic rope would need other angles for keys already cached: it is refused."""
    table = RopeTable(spec_from_config(config(rope_parameters=VARIANTS["dynamic"])).rope)
    assert len(table.cos_sin(256, CPU)) == 256
    with pytest.raises(ValueError, match="position 256 asked for: the model has 256"):
        table.cos_sin(257, CPU)
