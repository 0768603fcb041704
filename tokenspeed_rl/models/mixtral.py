"""Mixtral: Mistral with experts in every layer. In training its router may jitter; rollouts never do."""

from typing import Any

from tokenspeed_rl.models.hf_config import Options, expert_spec
from tokenspeed_rl.models.spec import ExpertNames


def options(config: Any) -> Options:
    """What a MixtralConfig chooses."""
    return Options(
        windows=(config.sliding_window,) * config.num_hidden_layers,
        experts=expert_spec(
            config,
            layers=range(config.num_hidden_layers),
            count=config.num_local_experts,
            width=config.intermediate_size,
            renormalise=True,
            rounded_weights=False,
        ),
        expert_names=ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
    )
