"""The gated feed-forward of a decoder layer: down(activation(gate(x)) * up(x))."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from tokenspeed_rl.layers.lora import Added
from tokenspeed_rl.layers.projection import Parts, project
from tokenspeed_rl_kernels import silu_mul

Activation = Callable[[Tensor], Tensor]


def _gated(activation: Activation) -> Activation:
    def gate(x: Tensor) -> Tensor:
        gates, values = x.chunk(2, 1)
        return activation(gates) * values

    return gate


_gelu_tanh = _gated(partial(F.gelu, approximate="tanh"))

ACTIVATIONS: dict[str, Activation] = {
    "silu": silu_mul,
    "swish": silu_mul,
    "gelu": _gated(F.gelu),
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": _gated(F.relu),
}
"""By the names of transformers: [T, 2I] gates and values -> [T, I]."""


def mlp(
    x: Tensor,
    gate_up: Parts,
    down: Parts,
    gate_up_bias: Parts | None,
    down_bias: Parts | None,
    activation: str,
    *,
    gate_up_added: Added = (),
    down_added: Added = (),
) -> Tensor:
    """x [T, H] -> [T, H], for gate_up [2I, H] and down [H, I], and what adapters add to their products."""
    gates = project(x, gate_up, gate_up_bias, gate_up_added)
    return project(ACTIVATIONS[activation](gates), down, down_bias, down_added)
