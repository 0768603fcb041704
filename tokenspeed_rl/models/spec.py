"""What the one decoder needs to know about a model, as numbers."""

from dataclasses import dataclass, field, fields

from tokenspeed_rl.layers.moe import ExpertSpec
from tokenspeed_rl.layers.rope import RopeSpec
from tokenspeed_rl.models.head import CAUSAL, Head


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """What checkpoints call the experts, which live modules pack as ``mlp.experts``."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Shape and options of a decoder-only transformer: RMS norms, rotary positions, gated MLPs or experts."""

    architecture: str
    """The transformers class, such as ``LlamaForCausalLM``."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    qk_norm: bool
    """An RMS norm over ``head_dim`` on each query and key head, before the rotation."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    activation: str
    """Name of the gate's activation, a key of ``layers.mlp.ACTIVATIONS``."""
    tied: bool
    """The output head is the embedding, and there is one."""
    windows: tuple[int | None, ...]
    """Sliding window per layer: a query sees itself and ``window - 1`` tokens before; None: all before."""
    max_position: int
    """Positions that the model was made for."""
    rope: RopeSpec
    head: Head = CAUSAL
    experts: ExpertSpec | None = None
    """None: every layer has the one MLP."""
    expert_names: ExpertNames = field(default_factory=ExpertNames)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Which layers have experts."""
        return () if self.experts is None else self.experts.layers

    def differences(self, other: "DecoderSpec") -> list[str]:
        """What of `other` isn't as it is here, in words."""
        return [
            f"{each.name} is {there!r}, not {here!r}"
            for each in fields(self)
            if (there := getattr(other, each.name)) != (here := getattr(self, each.name))
        ]
