"""The supported model families, as plain data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenspeed_rl.models import llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from tokenspeed_rl.models.hf_config import Options

_PARTS = ("Model", "DecoderLayer", "Attention", "RMSNorm", "RotaryEmbedding")
_DENSE = ("MLP",)
_EXPERTS = ("SparseMoeBlock", "TopKRouter", "Experts")


@dataclass(frozen=True, slots=True)
class Family:
    """One family: how transformers calls it, and what its config chooses."""

    model_type: str
    name: str
    """What the names of its transformers classes begin with."""
    options: Callable[[Any], Options]
    layers: tuple[str, ...] = _DENSE
    """What its layers have behind attention."""

    @property
    def architecture(self) -> str:
        """Its causal-LM class."""
        return f"{self.name}ForCausalLM"

    @property
    def classes(self) -> frozenset[str]:
        """Names of the transformers classes that compute what the decoder does, without head; activations
        aside."""
        return frozenset(self.name + part for part in (*_PARTS, *self.layers))


FAMILIES = (
    Family("llama", "Llama", llama.options),
    Family("mistral", "Mistral", mistral.options),
    Family("qwen2", "Qwen2", qwen2.options),
    Family("qwen3", "Qwen3", qwen3.options),
    Family("mixtral", "Mixtral", mixtral.options, _EXPERTS),
    Family("qwen3_moe", "Qwen3Moe", qwen3_moe.options, _DENSE + _EXPERTS),
)


def module_classes(architecture: str) -> frozenset[str]:
    """Names of the transformers classes that a live model of the architecture is made of, its own among
    them."""
    (classes,) = (each.classes for each in FAMILIES if architecture.startswith(f"{each.name}For"))
    return classes | {architecture}
