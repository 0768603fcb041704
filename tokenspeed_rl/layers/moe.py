"""The mixture of experts in place of a layer's MLP: each token goes through its k most likely experts.

Sources: Shazeer et al. 2017 (sparsely gated experts); Jiang et al. 2024 (Mixtral).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed_rl.layers.mlp import ACTIVATIONS
from tokenspeed_rl_kernels import linear


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """The experts of a model, the same in each layer that has some."""

    layers: tuple[int, ...]
    """Which layers have experts, in order; the others have the one MLP."""
    count: int
    """Experts of a layer."""
    per_token: int
    """How many of them compute a token."""
    width: int
    """Intermediate size of one expert."""
    renormalise: bool
    """Whether the weights of a token's experts are scaled to a sum of 1."""
    rounded_weights: bool
    """Whether those weights are rounded to the model's dtype; else they stay float32."""


@dataclass(frozen=True, slots=True)
class Routes:
    """Which experts compute each token, the likeliest first."""

    experts: Tensor
    """[T, k] int64."""
    weights: Tensor
    """[T, k], of each expert in the token's result."""


def route(x: Tensor, router: Tensor, spec: ExpertSpec) -> Routes:
    """Choose the experts of x [T, H] by a router [E, H]: softmax over all in float32, then the top k."""
    scores = linear(x, router)
    weights, experts = torch.topk(scores.softmax(-1, dtype=torch.float32), spec.per_token, -1)
    if spec.renormalise:
        weights /= weights.sum(-1, keepdim=True)
    return Routes(experts, weights.to(scores.dtype) if spec.rounded_weights else weights)


def experts(x: Tensor, routes: Routes, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    """The weighted sum of what each token's experts make of it.

    Tokens are sorted by expert, so that an expert is read once, and only if a token needs it.

    Args:
        x: [T, H].
        routes: of x.
        gate_up: [E, 2I, H].
        down: [E, H, I].
        activation: a key of `ACTIVATIONS`.

    Returns:
        [T, H]. A token's k results are added up in the order of its routes, whatever else is in x.
    """
    chosen = routes.experts.flatten()
    order = chosen.argsort(stable=True)
    rows = x[order // routes.experts.shape[1]]
    results = torch.empty_like(rows)
    start = 0
    for expert, count in enumerate(torch.bincount(chosen, minlength=len(down)).tolist()):
        if count:
            part = slice(start, start + count)
            inner = ACTIVATIONS[activation](linear(rows[part], gate_up[expert]))
            results[part] = linear(inner, down[expert])
            start += count
    weighted = results * routes.weights.flatten()[order].unsqueeze(1)
    by_token = torch.empty_like(weighted)
    by_token[order] = weighted
    return by_token.view(len(x), routes.experts.shape[1], x.shape[1]).sum(1).to(x.dtype)
