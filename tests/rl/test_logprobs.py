"""Logprobs and entropies out of logits, against one softmax per token."""

import math

import pytest
import torch
from torch import Tensor

from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.rl.logprobs import entropy_of, logprob_gap, token_logprobs
from tokenspeed_rl.rl.metrics import Metrics

VOCAB = 11


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, VOCAB, generator=generator, dtype=torch.float64)
    input_ids = torch.randint(VOCAB, (3, 5), generator=generator)
    mask = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    return logits, input_ids, mask


def test_token_logprobs_equal_a_softmax_per_token() -> None:
    """The action at t is judged by the logits at t - 1, divided by the rollout's temperature."""
    logits, input_ids, mask = inputs()
    logprobs, entropies = token_logprobs(logits, input_ids, mask, temperature=0.6)
    for b in range(3):
        for t in range(5):
            expected, entropy = 0.0, 0.0
            if mask[b, t]:
                weights = [math.exp(x / 0.6) for x in logits[b, t - 1].tolist()]
                p = [w / math.fsum(weights) for w in weights]
                expected = math.log(p[int(input_ids[b, t])])
                entropy = -math.fsum(x * math.log(x) for x in p)
            assert logprobs[b, t].item() == pytest.approx(expected, abs=1e-12)
            assert entropies[b, t].item() == pytest.approx(entropy, abs=1e-12)


def test_logits_outside_the_mask_are_not_read() -> None:
    """H3: NaN logits where nothing is predicted change neither values nor gradients, and get gradient 0."""
    logits, input_ids, mask = inputs()
    used = torch.zeros(3, 5, dtype=torch.bool)
    used[:, :-1] = mask[:, 1:]
    gradients = []
    for start in (logits, torch.where(used.unsqueeze(-1), logits, math.nan)):
        leaf = start.clone().requires_grad_()
        logprobs, entropies = token_logprobs(leaf, input_ids, mask)
        (logprobs.sum() - entropies.sum()).backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
    assert not gradients[0][~used].any()
    assert gradients[0][used].any()


def test_impossible_tokens_have_no_entropy() -> None:
    """A banned token (-inf) adds 0 to the entropy and NaN to no gradient."""
    logits = torch.tensor([0.3, -torch.inf, 1.2], requires_grad=True)
    entropy = entropy_of(torch.log_softmax(logits, -1))
    entropy.backward()
    allowed = torch.tensor([0.3, 1.2]).log_softmax(-1)
    assert entropy.item() == pytest.approx(-(allowed.exp() * allowed).sum().item(), rel=1e-6)
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert entropy_of(torch.full((4,), -math.log(4))).item() == pytest.approx(math.log(4))


def test_half_precision_logits_are_widened() -> None:
    """The softmax of bfloat16 logits is taken in float32."""
    logits, input_ids, mask = inputs()
    got, entropies = token_logprobs(logits.bfloat16(), input_ids, mask)
    expected, _ = token_logprobs(logits.bfloat16().float(), input_ids, mask)
    assert got.dtype == entropies.dtype == torch.float32
    assert torch.equal(got, expected)


def test_bad_arguments_are_refused() -> None:
    """A mask over the first token, a temperature of 0 and mismatched shapes are errors."""
    logits, input_ids, mask = inputs()
    with pytest.raises(RequestError, match="first token"):
        token_logprobs(logits, input_ids, torch.ones_like(mask))
    with pytest.raises(RequestError, match="temperature"):
        token_logprobs(logits, input_ids, mask, temperature=0.0)
    with pytest.raises(RequestError, match="logits"):
        token_logprobs(logits[:, 1:], input_ids, mask)


def test_logprob_gap() -> None:
    """H7: mean and largest |train - engine| over the actions of all micro-batches, NaN elsewhere ignored."""
    metrics = Metrics()
    train, rollout = torch.tensor([[-1.0, -2.0, math.nan]]), torch.tensor([[-1.5, -2.25, 0.0]])
    metrics.update(logprob_gap(train, rollout, torch.tensor([[True, True, False]])))
    metrics.update(logprob_gap(torch.zeros(1, 3), torch.zeros(1, 3), torch.tensor([[False, False, True]])))
    metrics.update(logprob_gap(train, rollout, torch.zeros(1, 3, dtype=torch.bool)))
    assert metrics.compute() == {"logprob_gap": 0.25, "logprob_gap_max": 0.5}
