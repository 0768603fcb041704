"""Llama, and models of its architecture (SmolLM2, TinyLlama, DeepSeek's distilled Llamas ...)."""

from typing import Any

from tokenspeed_rl.models.hf_config import Options


def options(config: Any) -> Options:
    """What a LlamaConfig chooses."""
    return Options(qkv_bias=config.attention_bias, o_bias=config.attention_bias, mlp_bias=config.mlp_bias)
