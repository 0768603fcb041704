"""Reading a transformers config: its numbers, and a refusal of whatever would change the computation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.layers.mlp import ACTIVATIONS
from tokenspeed_rl.layers.moe import ExpertSpec
from tokenspeed_rl.layers.rope import KINDS, RopeSpec, yarn_attention_factor
from tokenspeed_rl.models.spec import DecoderSpec, ExpertNames


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a family adds to the plain decoder."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] | None = None
    """Per layer; None: no layer has one."""
    experts: ExpertSpec | None = None
    expert_names: ExpertNames = field(default_factory=ExpertNames)


def windows_by_layer_type(config: Any) -> tuple[int | None, ...]:
    """Windows of a config that names each layer ``full_attention`` or ``sliding_attention``."""
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    unknown = sorted(set(config.layer_types) - set(windows))
    if unknown or ("sliding_attention" in config.layer_types and config.sliding_window is None):
        raise ConfigError(
            "layer_types names attention that isn't supported",
            got=unknown or "sliding_attention without a sliding_window",
            fix="Supported: full_attention, and sliding_attention with a sliding_window.",
        )
    return tuple(windows[kind] for kind in config.layer_types)


def expert_spec(
    config: Any,
    *,
    layers: Sequence[int],
    count: int,
    width: int,
    renormalise: bool,
    rounded_weights: bool = True,
) -> ExpertSpec | None:
    """The experts of a config's `layers`; None: no layer has any.

    Raises:
        ConfigError: a token would need more experts than there are, or none.
    """
    per_token = config.num_experts_per_tok
    if not layers:
        return None
    if not 1 <= per_token <= count:
        raise ConfigError(
            f"num_experts_per_tok must lie in 1 .. {count}, the number of experts", got=per_token
        )
    return ExpertSpec(
        layers=tuple(layers),
        count=count,
        per_token=per_token,
        width=width,
        renormalise=renormalise,
        rounded_weights=rounded_weights,
    )


def decoder_spec(config: Any, architecture: str, options: Options) -> DecoderSpec:
    """The spec of a transformers config.

    Raises:
        ConfigError: all that isn't supported, by name.
    """
    faults = [*_faults(config), *_rope_faults(config)]
    if faults:
        raise ConfigError(f"this {architecture} can't be served: {'; '.join(faults)}")
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return DecoderSpec(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(config),
        rms_eps=config.rms_norm_eps,
        qk_norm=options.qk_norm,
        qkv_bias=options.qkv_bias,
        o_bias=options.o_bias,
        mlp_bias=options.mlp_bias,
        activation=config.hidden_act,
        tied=bool(config.tie_word_embeddings),
        windows=options.windows or (None,) * config.num_hidden_layers,
        max_position=config.max_position_embeddings,
        rope=_rope_spec(config),
        experts=options.experts,
        expert_names=options.expert_names,
    )


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _faults(config: Any) -> list[str]:
    faults = []
    if getattr(config, "quantization_config", None) is not None:
        faults.append("quantization_config: quantised weights aren't supported, save them dequantised")
    if config.hidden_act not in ACTIVATIONS:
        faults.append(f"hidden_act={config.hidden_act!r}: supported are {', '.join(ACTIVATIONS)}")
    if not getattr(config, "is_causal", True):
        faults.append("is_causal=False: only causal attention is supported")
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % kv_heads:
        faults.append(f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
    if _head_dim(config) % 2:
        faults.append(f"head_dim={_head_dim(config)} is odd")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < 1:
        faults.append(f"sliding_window={window} is not positive")
    return faults


def _rope_parameters(config: Any) -> Mapping[str, Any]:
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    return parameters


def _kind(parameters: Mapping[str, Any]) -> Any:
    return parameters.get("rope_type", parameters.get("type", "default"))


def _rope_faults(config: Any) -> list[str]:
    parameters = _rope_parameters(config)
    nested = sorted(key for key, value in parameters.items() if isinstance(value, Mapping))
    if nested:
        return [f"rope_parameters differ by layer type ({', '.join(nested)}): only one set is supported"]
    faults = []
    if _kind(parameters) not in KINDS:
        faults.append(f"rope_type={_kind(parameters)!r}: supported are {', '.join(KINDS)}")
    partial = parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if partial not in (None, 1):
        faults.append(f"partial_rotary_factor={partial}: only whole heads are rotated")
    return faults


def _rope_spec(config: Any) -> RopeSpec:
    p = _rope_parameters(config)
    kind, longest = _kind(p), config.max_position_embeddings
    original = p.get("original_max_position_embeddings") or longest
    # transformers takes a missing factor of yarn from the two context lengths.
    factor = p.get("factor") or (longest / original if kind == "yarn" else 1.0)
    attention_factor = p.get("attention_factor") if kind == "yarn" else 1.0
    if attention_factor is None:
        attention_factor = yarn_attention_factor(factor, p.get("mscale"), p.get("mscale_all_dim"))
    return RopeSpec(
        kind=kind,
        dim=_head_dim(config),
        theta=float(p.get("rope_theta") or getattr(config, "rope_theta", None) or config.default_theta),
        max_position=longest,
        factor=factor,
        attention_factor=attention_factor,
        original_max_position=original,
        beta_fast=p.get("beta_fast") or 32.0,
        beta_slow=p.get("beta_slow") or 1.0,
        truncate=p.get("truncate", True),
        low_freq_factor=p.get("low_freq_factor", 1.0),
        high_freq_factor=p.get("high_freq_factor", 4.0),
    )
