"""Losses of PPO and GRPO. Tensors are [B, T], aligned with `input_ids`; only what the mask covers is read.

Each loss is a sum over actions divided by a `denominator` that the caller counts over the whole batch, so
that micro-batches and ranks add up to the loss and gradient of the whole (see `masked_mean`). Metrics add up
the same way (see `Metrics`).
"""

from typing import Literal

import torch
from torch import Tensor

from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.rl.masked import at_least_float32, masked_max, masked_mean, same_shape
from tokenspeed_rl.rl.metrics import MetricTensors, mean_of

KLKind = Literal["k1", "k2", "k3"]

# exp(20) is a ratio of 5e8: past any use, and far from the overflow of float32 at exp(88).
MAX_LOG_RATIO = 20.0


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    denominator: float | Tensor,
) -> tuple[Tensor, MetricTensors]:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7), negated: minimise it.

    Per action `-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)`, where
    `ratio = exp(logprobs - old_logprobs)`. Gradient flows into `logprobs` only. `clip_low` in 0 .. 1,
    `clip_high` >= 0; DAPO's "clip higher" is a larger `clip_high`. Log ratios above 20 count as 20 and have
    no gradient, so that nothing overflows.

    Metrics, over actions: `policy_loss`; `clip_fraction`, where the clip takes the gradient away;
    `approx_kl`, the k3 estimate of KL(old || new) in nats; `ratio` and `ratio_max`.
    """
    if not (0.0 <= clip_low <= 1.0 and clip_high >= 0.0):
        raise RequestError(
            "(clip_low, clip_high) keep ratios in 1 - clip_low .. 1 + clip_high: in 0 .. 1, and at least 0",
            got=(clip_low, clip_high),
            fix="Pass 0.2 for both, for example.",
        )
    same_shape(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    log_ratio = torch.where(mask, at_least_float32(logprobs) - old_logprobs.detach(), 0.0)
    log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
    advantages = advantages.detach()
    ratio = log_ratio.exp()
    surrogate = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    losses = -torch.minimum(surrogate, clipped)
    metrics = {
        "policy_loss": mean_of(losses, mask),
        "clip_fraction": mean_of(clipped < surrogate, mask),
        "approx_kl": mean_of(torch.expm1(log_ratio) - log_ratio, mask),
        "ratio": mean_of(ratio, mask),
        "ratio_max": masked_max(ratio, mask),
    }
    return masked_mean(losses, mask, denominator), metrics


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None,
    denominator: float | Tensor,
) -> tuple[Tensor, MetricTensors]:
    """Half the squared error of `values` against `returns`, clipped as in PPO's reference implementation.

    Per action `max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2) / 2`; `clip=None` doesn't clip.
    Gradient flows into `values` only. Metrics, over actions: `value_loss`, `value_clip_fraction`, `value`,
    `return`.
    """
    if clip is not None and not clip > 0.0:
        raise RequestError(
            "clip must be positive", got=clip, fix="Pass None for a value loss without clipping."
        )
    same_shape(mask, values=values, old_values=old_values, returns=returns)
    values = torch.where(mask, at_least_float32(values), 0.0)
    old_values, returns = old_values.detach(), returns.detach()
    errors = (values - returns).square()
    active = torch.zeros_like(mask)
    if clip is not None:
        clipped_errors = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
        active = clipped_errors > errors
        errors = torch.maximum(errors, clipped_errors)
    losses = 0.5 * errors
    metrics = {
        "value_loss": mean_of(losses, mask),
        "value_clip_fraction": mean_of(active, mask),
        "value": mean_of(values, mask),
        "return": mean_of(returns, mask),
    }
    return masked_mean(losses, mask, denominator), metrics


def kl_estimate(
    logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind, *, mask: Tensor | None = None
) -> Tensor:
    """Estimate of KL(policy || reference) in nats from the tokens the policy drew, one number per token.

    With d = ref_logprobs - logprobs of the drawn token (Schulman, "Approximating KL divergence", 2020):

    - `k1` = -d: unbiased, may be negative.
    - `k2` = d^2 / 2: biased, never negative.
    - `k3` = exp(d) - 1 - d: unbiased, never negative.

    The *value* of an estimate and its *gradient* are different things. Averaged over tokens drawn from the
    policy, the gradient with respect to the policy's parameters is

    - of k1: zero. As a loss it is pure noise; subtract it, detached, from the reward instead.
    - of k2: that of KL(policy || reference). As a loss use this one.
    - of k3: that of the *forward* KL(reference || policy).

    Gradient flows into `logprobs` only. Shapes are equal and otherwise free. Outside `mask`, of the same
    shape, the estimate is 0 and nothing is read; without one, every entry must be a logprob.
    """
    same_shape(logprobs, ref_logprobs=ref_logprobs)
    difference = ref_logprobs.detach() - at_least_float32(logprobs)
    if mask is not None:
        same_shape(mask, logprobs=logprobs)
        difference = torch.where(mask, difference, 0.0)
    if kind == "k1":
        return -difference
    if kind == "k2":
        return 0.5 * difference.square()
    if kind == "k3":
        return torch.expm1(difference) - difference
    raise RequestError("kind must be 'k1', 'k2' or 'k3'", got=kind, fix="Pass 'k2' where it is a loss.")
