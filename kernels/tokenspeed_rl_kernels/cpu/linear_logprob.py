"""`linear_logprob` in torch, a part of the vocabulary at a time."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed_rl_kernels.vocab_parts import gradients, parts

ELEMENTS = 2**22
"""Logits of a part: 16 MiB of float32."""
IMPOSSIBLE = -1e4
"""What stands for the logarithm of 0, which times 0 is NaN: exp of this is 0 as well, in float64 too."""


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, part: slice) -> Tensor:
    """[T, part], in hidden's dtype."""
    part_bias = None if bias is None else bias[part].to(hidden.dtype)
    return F.linear(hidden, weight[part].to(hidden.dtype), part_bias).div_(temperature)


def _place(targets: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Which targets lie in the part [T], and at which column, the nearest one if they don't [T, 1]."""
    inside = (targets >= part.start) & (targets < part.stop)
    return inside, (targets - part.start).clamp(0, part.stop - part.start - 1).unsqueeze(1)


def forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `linear_logprob_forward`."""
    hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    top = hidden.new_full((len(hidden),), torch.finfo(hidden.dtype).min)
    mass, weighted, chosen = hidden.new_zeros(3, len(hidden))
    for part in parts(len(hidden), len(weight), ELEMENTS):
        z = _logits(hidden, weight, bias, temperature, part)
        inside, column = _place(targets, part)
        chosen = torch.where(inside, z.gather(1, column).squeeze(1), chosen)
        before, top = top, torch.maximum(top, z.amax(1))
        fall = before - top
        z -= top.unsqueeze(1)
        p = z.exp()
        mass_here = p.sum(1)
        weighted = fall.exp() * (weighted + fall * mass) + p.mul_(z.clamp_(min=IMPOSSIBLE)).sum(1)
        mass = fall.exp() * mass + mass_here
    log_mass = mass.log()
    return chosen - top - log_mass, log_mass - weighted / mass, torch.stack((top, log_mass))


def backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    rows: Tensor,
    temperature: float,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """See `linear_logprob_backward`."""
    wide = hidden.to(rows.dtype)
    top, log_mass, grad_logprob, grad_entropy, base = rows.unsqueeze(2)

    def slopes(part: slice) -> Tensor:
        z = _logits(wide, weight, bias, temperature, part).sub_(top).sub_(log_mass)
        p = z.exp()
        slope = z.clamp_(min=IMPOSSIBLE).mul_(grad_entropy).add_(base).mul_(p).neg_()
        inside, column = _place(targets, part)
        hits = torch.where(inside.unsqueeze(1), grad_logprob, 0.0)
        return slope.scatter_add_(1, column, hits).div_(temperature)

    return gradients(hidden, weight, slopes, ELEMENTS, wanted)
