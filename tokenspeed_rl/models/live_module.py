"""Does a live module, of the right classes, names and shapes, compute with a spec's numbers?"""

import math
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from tokenspeed_rl.models.registry import spec_from_config
from tokenspeed_rl.models.spec import DecoderSpec
from tokenspeed_rl.weights.adapters import lora_layers
from tokenspeed_rl.weights.mapping import canonical


def module_faults(spec: DecoderSpec, root: nn.Module) -> Iterator[str]:
    """All of `config_faults`; then adapters that no request could name; then, by name, plain attributes that
    were changed in the module, whatever its config says: `top_k`, `scaling`, `variance_epsilon` ..."""
    yield from (f"its config's {fault}" for fault in config_faults(spec, root))
    if lora_layers(root) and not spec.head.generates:
        yield "LoRA adapters can't be shared with a model that scores, as no score asks for one: merge them"
    numbers = _numbers(spec)
    for name, module in root.named_modules(remove_duplicate=False):
        for attribute, there in numbers.get(canonical(name), {}).items():
            here = getattr(module, attribute, there)  # not every family's module has it
            if not _equal(here, there):
                yield f"{name}.{attribute} is {here!r}, not the engine's {there!r}"


def config_faults(spec: DecoderSpec, root: nn.Module) -> list[str]:
    """What the module's config says otherwise than the spec; nothing of a module of another class."""
    config = getattr(root, "config", None)
    if type(root).__name__ != spec.architecture or not isinstance(config, PretrainedConfig):
        return []
    return spec.differences(spec_from_config(config, type(root).__name__))


def _numbers(spec: DecoderSpec) -> dict[str, dict[str, Any]]:
    """Name of each module that computes with plain numbers of its own -> attribute -> its value."""
    norm = {"variance_epsilon": spec.rms_eps}
    attention = {
        "scaling": spec.head_dim**-0.5,
        "head_dim": spec.head_dim,
        "num_key_value_groups": spec.num_heads // spec.num_kv_heads,
        "is_causal": True,
    }
    numbers: dict[str, dict[str, Any]] = {
        "model.embed_tokens": {"max_norm": None},
        "model.rotary_emb": {"attention_scaling": spec.rope.attention_factor},
        "model.norm": norm,
    }
    for layer, window in enumerate(spec.windows):
        prefix = f"model.layers.{layer}"
        norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
        numbers |= {f"{prefix}.{each}": norm for each in norms}
        numbers[f"{prefix}.self_attn"] = {**attention, "sliding_window": window}
        if spec.experts is not None:
            routing = {"top_k": spec.experts.per_token, "norm_topk_prob": spec.experts.renormalise}
            numbers[f"{prefix}.mlp.gate"] = routing
    return numbers


def _equal(here: object, there: object) -> bool:
    """Whether they are one number, or both None."""
    if isinstance(here, int | float) and isinstance(there, int | float):
        return math.isclose(here, there, rel_tol=1e-9)
    return here is there
