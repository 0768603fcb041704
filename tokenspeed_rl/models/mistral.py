"""Mistral: Llama with a sliding window in every layer."""

from typing import Any

from tokenspeed_rl.models.hf_config import Options


def options(config: Any) -> Options:
    """What a MistralConfig chooses."""
    return Options(windows=(config.sliding_window,) * config.num_hidden_layers)
