"""Qwen2 and Qwen2.5: biases on queries, keys and values; sliding windows in the layers the config names."""

from typing import Any

from tokenspeed_rl.models.hf_config import Options, windows_by_layer_type


def options(config: Any) -> Options:
    """What a Qwen2Config chooses."""
    return Options(qkv_bias=True, windows=windows_by_layer_type(config))
