"""Qwen3: norms on query and key heads, a head dim of its own, and sliding windows as in Qwen2."""

from typing import Any

from tokenspeed_rl.models.hf_config import Options, windows_by_layer_type


def options(config: Any) -> Options:
    """What a Qwen3Config chooses."""
    return Options(
        qk_norm=True,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        windows=windows_by_layer_type(config),
    )
