"""What the one decoder needs to know about a model, as numbers."""

from dataclasses import dataclass

from tokenspeed_rl.layers.rope import RopeSpec
from tokenspeed_rl.models.head import CAUSAL, Head


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Shape and options of a decoder-only transformer with RMS norms, rotary positions and a gated MLP."""

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
