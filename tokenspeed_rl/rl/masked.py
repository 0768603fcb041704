"""Sums over the actions of a batch, which no value outside the mask can reach, forwards or backwards."""

import math

import torch
from torch import Tensor

from tokenspeed_rl.errors import RequestError


def at_least_float32(x: Tensor) -> Tensor:
    """`x` as it is when float32 or float64, else as float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def same_shape(mask: Tensor, **tensors: Tensor) -> None:
    """`RequestError` naming the first of `tensors` whose shape isn't that of `mask`."""
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise RequestError(
                f"{name} must have the mask's shape, {tuple(mask.shape)}",
                got=tuple(tensor.shape),
                fix="Align both with input_ids.",
            )


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of `x` where `mask` is true, 0-dim; NaN and inf elsewhere reach neither it nor `x`'s gradient."""
    same_shape(mask, x=x)
    return torch.where(mask, x, 0.0).sum()


def masked_max(x: Tensor, mask: Tensor) -> Tensor:
    """Largest of the non-negative `x` where `mask` is true, 0-dim, detached; 0 when the mask is empty."""
    same_shape(mask, x=x)
    inside = torch.where(mask, x.detach(), 0.0).flatten()
    return inside.max() if inside.numel() else inside.new_zeros(())


def masked_mean(x: Tensor, mask: Tensor, denominator: float | Tensor) -> Tensor:
    """`masked_sum(x, mask) / denominator`, 0-dim.

    `denominator` is the count over the *whole* batch, all micro-batches and ranks together, so that the parts
    add up to the mean of the whole however it is split. Under DDP or FSDP, which average gradients over the
    ranks, pass count / world_size. A tensor costs a device sync; a float doesn't. 0 is right only where
    nothing is left to count: the result is then 0, still part of the graph, so that `backward()` runs.
    """
    total = masked_sum(x, mask)
    divisor = float(denominator)
    if 0.0 < divisor < math.inf:
        return total / divisor
    if divisor == 0.0 and not mask.any():
        return total
    raise RequestError(
        f"denominator must be positive and finite; the mask alone has {int(mask.sum())} actions",
        got=divisor,
        fix="Pass the number of actions of the whole batch.",
    )
