"""Logprobs and entropies without logits, in Triton."""

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.logprobs import gradients, inputs
from tokenspeed_rl_kernels.gpu import linear_logprob as gpu
from tokenspeed_rl_kernels.linear_logprob import CASES, linear_logprob, reference


@pytest.fixture
def small_parts(monkeypatch):
    """So small that there are several."""
    monkeypatch.setattr(gpu, "ELEMENTS", 1)
    monkeypatch.setattr(gpu, "SPLIT", 256)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_as_exact_as_torch(case, dtype, small_parts, check_exact):
    """Results and gradients are those of all logits at once: any sizes, splits, parts, bias, temperature."""
    arguments, options = inputs(case, dtype)
    exact = gradients(reference, arguments, options, torch.float64)
    torchs = gradients(reference, arguments, options, dtype)
    ours = gradients(linear_logprob, arguments, options, dtype)
    for got, theirs, wanted in zip(ours, torchs, exact, strict=True):
        assert got.dtype == theirs.dtype
        check_exact(got, theirs, wanted)


def test_extreme_logits(small_parts, check_exact):
    """Logits of +-1e4, and a bias of -inf on one token and on whole tiles: as exact as torch, and no NaN."""
    weight = torch.cat((torch.full((250, 1), -1e4), torch.full((1, 1), 1e4), torch.zeros(249, 1)))
    bias = torch.zeros(500)
    bias[[3, *range(64, 192), *range(256, 500)]] = -torch.inf
    arguments = torch.tensor([[1.0], [-1.0], [0.0]]), weight, torch.tensor([250, 0, 200])
    options = {"bias": bias, "temperature": 1.0}
    exact = gradients(reference, arguments, options, torch.float64)
    torchs = gradients(reference, arguments, options, torch.float32)
    ours = gradients(linear_logprob, arguments, options, torch.float32)
    for got, theirs, wanted in zip(ours, torchs, exact, strict=True):
        check_exact(got, theirs, wanted)


def test_targets_out_of_range(small_parts):
    """Their logprobs are NaN, all else is right; left out of the loss, they leave no trace in gradients."""
    case = CASES[2]
    (hidden, weight, targets), options = inputs(case)
    bad = targets.clone()
    bad[[0, 2, 4, 5]] = torch.tensor([-100, case.vocab, 2**40, -1])
    good = torch.tensor([1, 3, 6])
    found = []
    for given in (targets, bad):
        weight.grad = None
        logprob, entropy = linear_logprob(hidden, weight.requires_grad_(), given, **options)
        logprob[good].sum().backward()
        found.append((logprob.detach(), entropy.detach(), weight.grad))
    (logprob, entropy, grad), (bad_logprob, bad_entropy, bad_grad) = found
    assert bad_logprob.isnan().nonzero().flatten().tolist() == [0, 2, 4, 5]
    assert torch.equal(bad_logprob[good], logprob[good])
    assert torch.equal(bad_entropy, entropy) and torch.equal(bad_grad, grad)


def test_not_a_number():
    """NaN in a token's hidden state is NaN in its results, and in no other's."""
    (hidden, weight, targets), options = inputs(CASES[2])
    hidden[3, 5] = torch.nan
    for result in linear_logprob(hidden, weight, targets, **options):
        assert result.isnan().nonzero().flatten().tolist() == [3]


def test_tokens_of_any_batch_agree(small_parts):
    """Bit for bit, whatever their number and order."""
    (hidden, weight, targets), options = inputs(CASES[3])
    whole = linear_logprob(hidden, weight, targets, **options)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    for some in (slice(1), slice(7), slice(63, 66), order):
        part = linear_logprob(hidden[some], weight, targets[some], **options)
        assert torch.equal(part[0], whole[0][some]) and torch.equal(part[1], whole[1][some])


def test_parts_of_larger_tensors(small_parts):
    """Rows may lie apart, gradients come expanded, and nothing is read beside the rows: there is NaN."""
    (hidden, weight, targets), options = inputs(CASES[2])
    apart = [F.pad(t, (0, 5, 0, 3), value=torch.nan)[: len(t), : t.shape[1]] for t in (hidden, weight)]
    found = []
    for tensors in ((hidden, weight), apart):
        tensors = [t.detach().requires_grad_() for t in tensors]
        logprob, _ = linear_logprob(*tensors, targets.repeat_interleave(2)[::2], **options)
        logprob.sum().backward()
        found.append((logprob, *(t.grad for t in tensors)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_other_dtypes_are_refused():
    """What tiles would sum in float32 all the same."""
    (hidden, weight, targets), _ = inputs(CASES[0], torch.float64)
    with pytest.raises(ValueError, match="dtype has no kernel"):
        linear_logprob(hidden, weight, targets)
