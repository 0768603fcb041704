"""What each action was worth: generalised advantage estimation, group advantages, whitening.

Results carry no gradient. A NaN in `rewards[B]` means *no reward*: the reward function abstained.
"""

from typing import Literal

import torch
from torch import Tensor

from tokenspeed_rl.errors import ConfigError, RequestError
from tokenspeed_rl.rl.masked import at_least_float32, same_shape


def require_group(n: int) -> None:
    """`ConfigError` unless `n` samples a prompt can be compared with each other."""
    if n < 2:
        raise ConfigError(
            "group advantages compare the samples of one prompt, so n must be at least 2",
            got=n,
            fix="Set n to 2 or more, or use gae with a value model.",
        )


@torch.no_grad()
def terminal_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """`rewards` [B] laid out over `mask` [B, T]: each at its row's last action, 0 elsewhere -> [B, T].

    A row without actions, or without a reward (NaN), stays 0.
    """
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(last, at_least_float32(rewards).nan_to_num(nan=0.0).unsqueeze(1), 0.0)


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16) over the actions of each row.

    `rewards`, `values`: [B, T] floats; `mask`: [B, T] bool, true on actions. `values[b, t]` is the value of
    the state in which token `t` is chosen: a value head's output at position `t - 1`. Time runs from action
    to action: tokens outside the mask (prompt, observations, padding) cost no discount, pass the credit of
    what comes later on unchanged, and get none. What `rewards` and `values` hold there is not read, be it
    NaN. The state after a row's last action is worth 0, also where the row was truncated.

    Returns `(advantages, returns)`, both [B, T], 0 outside the mask; `returns = advantages + values`.
    """
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= value <= 1.0:
            raise RequestError(f"{name} must be in 0 .. 1", got=value, fix="Pass 1.0 for no discount.")
    same_shape(mask, rewards=rewards, values=values)
    rewards, values = at_least_float32(rewards), at_least_float32(values)
    advantages = torch.zeros_like(values)
    advantage = next_value = values.new_zeros(len(values))
    for t in reversed(range(mask.shape[1])):
        action = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(action, delta + gamma * lam * advantage, advantage)
        next_value = torch.where(action, values[:, t], next_value)
        advantages[:, t] = torch.where(action, advantage, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


@torch.no_grad()
def group_advantages(
    rewards: Tensor, groups: Tensor, *, scale: Literal["std", "none"] = "std", eps: float = 1e-6
) -> Tensor:
    """How much better each sample did than its group (GRPO: Shao et al. 2024, section 4.1.2) -> [B].

    `rewards`: [B] floats, NaN where a sample has none: it gets 0 and its group's statistics leave it out.
    `groups`: [B] integers, any labels in any order. `scale="std"`: (r - mean) / (std + eps) with the sample
    standard deviation (n - 1); `"none"`: r - mean, as in Dr. GRPO. A group whose rewards are all equal gets
    exactly 0. A group of one sample is refused: its advantage would be 0 whatever it did.
    """
    if scale not in ("std", "none"):
        raise RequestError("scale must be 'std' or 'none'", got=scale, fix="Pass 'std' for GRPO's scaling.")
    same_shape(groups, rewards=rewards)
    labels, group, sizes = torch.unique(groups.cpu(), return_inverse=True, return_counts=True)
    if (sizes < 2).any():
        raise RequestError(
            "a group needs at least two samples to compare",
            got=f"one in group {labels[sizes < 2][0].item()}",
            fix="Sample with n=2 or more.",
        )
    # On the CPU: B is small, float64 exists everywhere, and index_add_ sums in a fixed order.
    exact = rewards.cpu().double()
    scored = ~exact.isnan()
    weight = scored.double()
    count = weight.new_zeros(len(labels)).index_add_(0, group, weight).clamp(min=1.0)

    def group_sum(x: Tensor) -> Tensor:
        return torch.zeros_like(count).index_add_(0, group, torch.where(scored, x, 0.0))

    # Relative to a member first: equal rewards then give exact zeros, which r - sum(r) / n may not.
    lowest = torch.full_like(count, torch.inf).scatter_reduce_(
        0, group, torch.where(scored, exact, torch.inf), "amin"
    )
    relative = exact - lowest[group]
    deviation = relative - (group_sum(relative) / count)[group]
    if scale == "std":
        variance = group_sum(deviation.square()) / (count - 1).clamp(min=1.0)
        deviation = _scaled(deviation, (variance.sqrt() + eps)[group])
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    return torch.where(scored, deviation, 0.0).to(rewards.device, dtype)


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """`x` [B, T] shifted to mean 0 and scaled to standard deviation 1 over `mask`; 0 outside it.

    The deviation divides by the count. Equal values, a single one, and an empty mask give exactly 0. The
    statistics are those of the tensor given: whiten the whole batch, then split it into minibatches.
    """
    same_shape(mask, x=x)
    inside = at_least_float32(x)[mask].double()
    if inside.numel() == 0:
        return torch.zeros_like(at_least_float32(x))
    deviation = inside - inside[0]
    deviation = deviation - deviation.mean()
    white = torch.zeros_like(at_least_float32(x))
    white[mask] = _scaled(deviation, (deviation.square().mean() + eps).sqrt()).to(white.dtype)
    return white


def _scaled(deviation: Tensor, scale: Tensor) -> Tensor:
    """`deviation / scale`, and 0 for no deviation, whatever the scale."""
    return torch.where(deviation == 0.0, 0.0, deviation / scale)
