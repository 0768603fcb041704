"""A policy with a value head, which PPO trains. A pass gives the actions' logprobs, entropies, values."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tokenspeed_rl.rl.logprobs import entropy_of
from tokenspeed_rl.rl.trajectory import TrajectoryBatch


class Evaluation(NamedTuple):
    """Of each action, aligned with `input_ids`: [B, T] float32, 0 elsewhere."""

    logprobs: Tensor
    entropies: Tensor
    values: Tensor


class Actor(nn.Module):
    """A causal LM and a linear value head over its last hidden state, which starts at 0."""

    def __init__(self, model: PreTrainedModel, *, temperature: float) -> None:
        """`temperature`: that of the rollouts, so that logprobs are those of the distribution drawn from."""
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.value_head = nn.Linear(model.config.hidden_size, 1, dtype=torch.float32, device=model.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, input_ids: Tensor, action_mask: Tensor) -> Evaluation:
        """`input_ids` [B, T] padded on the right, `action_mask` [B, T] bool, never true at position 0.

        Action `t` is judged from the hidden state at `t - 1`. Padding needs no attention mask: it lies behind
        every action, where a causal model doesn't look. Only actions get a row as wide as the vocabulary.
        """
        hidden = self.model.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state
        hidden = hidden[:, :-1][action_mask[:, 1:]]
        logits = self.model.get_output_embeddings()(hidden).float() / self.temperature
        rows = torch.log_softmax(logits, dim=-1)
        chosen = rows.gather(-1, input_ids[action_mask].unsqueeze(-1)).squeeze(-1)
        values = self.value_head(hidden.float()).squeeze(-1)
        blank = rows.new_zeros(action_mask.shape)
        return Evaluation(*(blank.masked_scatter(action_mask, x) for x in (chosen, entropy_of(rows), values)))

    @torch.no_grad()
    def evaluate(self, batch: TrajectoryBatch, size: int) -> Evaluation:
        """`forward` over a whole batch without gradients, `size` rows at a time."""
        parts = [self(part.input_ids, part.action_mask) for part in batch.minibatches(size)]
        return Evaluation(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
