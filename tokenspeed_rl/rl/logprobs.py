"""Logprobs and entropies out of a trainer's logits, and how far they lie from the engine's."""

import torch
from torch import Tensor

from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.rl.masked import at_least_float32, masked_max, same_shape
from tokenspeed_rl.rl.metrics import MetricTensors, mean_of


def token_logprobs(
    logits: Tensor, input_ids: Tensor, mask: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Logprob of each action, and entropy of the distribution it was drawn from (nats): [B, T], 0 elsewhere.

    `logits`: [B, T, V] of a causal model, whose entry at `t - 1` predicts token `t`; `input_ids`: [B, T];
    `mask`: [B, T] bool, the actions (position 0 never is one). Results are aligned with `input_ids`. Computed
    in float32 or wider, for the actions only: neither values nor gradients come from other positions.
    `temperature` is that of the rollout, so that these are the engine's `"sampling"` logprobs.
    """
    if not temperature > 0.0:
        raise RequestError("temperature must be positive", got=temperature, fix="Pass that of the rollout.")
    same_shape(mask, input_ids=input_ids)
    same_shape(mask, logits=logits[..., 0])
    if mask[:, :1].any():
        raise RequestError(
            "the first token of a row has no prediction, and the mask covers it",
            fix="Leave prompts out of the mask.",
        )
    rows = torch.log_softmax(at_least_float32(logits[:, :-1][mask[:, 1:]]) / temperature, dim=-1)
    chosen = rows.gather(-1, input_ids[mask].unsqueeze(-1)).squeeze(-1)
    blank = rows.new_zeros(mask.shape)
    return blank.masked_scatter(mask, chosen), blank.masked_scatter(mask, entropy_of(rows))


def entropy_of(log_probabilities: Tensor) -> Tensor:
    """Entropy in nats along the last dimension; impossible outcomes (-inf) add 0 and have no gradient."""
    finite = log_probabilities.masked_fill(log_probabilities == -torch.inf, 0.0)
    return -(log_probabilities.exp() * finite).sum(-1)


def logprob_gap(train: Tensor, rollout: Tensor, mask: Tensor) -> MetricTensors:
    """|train - rollout| over the actions: metrics `logprob_gap` (mean) and `logprob_gap_max`, in nats.

    Both [B, T]: the trainer's own logprobs before any step on this batch, and the engine's. What is more than
    rounding makes every ratio of the step wrong.
    """
    gap = (at_least_float32(train.detach()) - rollout).abs()
    return {"logprob_gap": mean_of(gap, mask), "logprob_gap_max": masked_max(gap, mask)}
