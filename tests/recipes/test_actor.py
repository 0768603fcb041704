"""The actor: one pass over right-padded rows equals the plain computation, row by row."""

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tokenspeed_rl.recipes.actor import Actor
from tokenspeed_rl.rl.sample import Sample
from tokenspeed_rl.rl.trajectory import TrajectoryBatch

Policy = tuple[PreTrainedModel, PreTrainedTokenizerFast]
LENGTHS = ((3, 4), (5, 1), (2, 6), (4, 4), (1, 2))


@pytest.fixture
def batch() -> TrajectoryBatch:
    """Five rows of other lengths; the last has a token in its middle that isn't the policy's."""
    draw = torch.Generator().manual_seed(1)
    samples = []
    for group, (prompt, output) in enumerate(LENGTHS):
        ids = torch.randint(3, 90, (prompt + output,), generator=draw).tolist()
        samples.append(
            Sample(
                prompt=None,
                prompt_ids=ids[:prompt],
                group=group,
                index=0,
                output_ids=ids[prompt:],
                logprobs=[0.0] * output,
                action_mask=[i != 2 for i in range(output)],
            )
        )
    return TrajectoryBatch.from_samples(samples, [1.0] * len(samples), pad_token_id=0)


def make_actor(model: PreTrainedModel, temperature: float) -> Actor:
    actor = Actor(model, temperature=temperature)
    torch.nn.init.normal_(actor.value_head.weight)
    torch.nn.init.normal_(actor.value_head.bias)
    return actor


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_the_plain_computation(policy: Policy, batch: TrajectoryBatch, temperature: float) -> None:
    """H7: logprobs, entropies and values are those of each row alone, in float64, from the whole logits."""
    actor = make_actor(policy[0], temperature)
    got = actor(batch.input_ids, batch.action_mask)
    exact = policy[0].double()
    head = actor.value_head.double()
    for row, (prompt, output) in enumerate(LENGTHS):
        length = prompt + output
        ids = batch.input_ids[row : row + 1, :length]
        out = exact(input_ids=ids, output_hidden_states=True)
        for t in range(length):
            if not batch.action_mask[row, t]:
                assert got.logprobs[row, t] == got.entropies[row, t] == got.values[row, t] == 0.0
                continue
            choice = torch.distributions.Categorical(logits=out.logits[0, t - 1] / temperature)
            value = head(out.hidden_states[-1][0, t - 1])
            assert got.logprobs[row, t].item() == pytest.approx(choice.log_prob(ids[0, t]).item(), abs=1e-5)
            assert got.entropies[row, t].item() == pytest.approx(choice.entropy().item(), abs=1e-5)
            assert got.values[row, t].item() == pytest.approx(value.item(), abs=1e-4)


def test_parts_equal_the_whole(policy: Policy, batch: TrajectoryBatch) -> None:
    """H1: evaluating in micro-batches gives the rows of the whole batch, in order, without a graph."""
    actor = make_actor(policy[0], 1.0)
    whole = actor(batch.input_ids, batch.action_mask)
    parts = actor.evaluate(batch, 2)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=1e-5)
        assert not b.requires_grad


def test_values_start_at_nothing(policy: Policy, batch: TrajectoryBatch) -> None:
    """A fresh value head predicts 0 everywhere, and learns."""
    actor = Actor(policy[0], temperature=1.0)
    values = actor(batch.input_ids, batch.action_mask).values
    assert not values.any()
    (values - batch.action_mask.float()).square().sum().backward()
    assert actor.value_head.weight.grad is not None and actor.value_head.weight.grad.any()
