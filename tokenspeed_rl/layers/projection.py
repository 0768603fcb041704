"""A linear layer whose weight may be one tensor or several parts stacked."""

import torch
from torch import Tensor

from tokenspeed_rl.layers.lora import Added, add_low_rank
from tokenspeed_rl_kernels import linear

Parts = tuple[Tensor, ...]
"""One fused tensor, or the parts that it would be made of, stacked along dim 0."""


def project(x: Tensor, weight: Parts, bias: Parts | None = None, added: Added = ()) -> Tensor:
    """x [T, K] times a weight [N, K], plus a bias [N], either of which may lie in parts, plus what adapters
    add: [T, N]."""
    if len(weight) == 1:
        y = linear(x, weight[0], None if bias is None else _whole(bias))
    else:
        y = torch.cat([linear(x, part) for part in weight], 1)
        y = y if bias is None else y.add_(_whole(bias))
    return add_low_rank(y, x, added) if added else y


def _whole(parts: Parts) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
