"""Qwen3-MoE: Qwen3 with experts, but in the layers that the config keeps dense."""

from typing import Any

from tokenspeed_rl.models.hf_config import Options, expert_spec


def options(config: Any) -> Options:
    """What a Qwen3MoeConfig chooses."""
    step, dense = config.decoder_sparse_step, config.mlp_only_layers
    layers = [at for at in range(config.num_hidden_layers) if at not in dense and (at + 1) % step == 0]
    return Options(
        qk_norm=True,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        windows=(config.sliding_window,) * config.num_hidden_layers,
        experts=expert_spec(
            config,
            layers=layers if config.num_experts else (),
            count=config.num_experts,
            width=config.moe_intermediate_size,
            renormalise=config.norm_topk_prob,
        ),
    )
