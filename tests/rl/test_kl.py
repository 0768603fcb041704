"""KL estimators against the exact KL and its gradients, by autograd on a vocabulary of five."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.rl.losses import KLKind, kl_estimate


def policies() -> tuple[Tensor, Tensor]:
    """Logits of a policy, with gradient, and logprobs of a reference."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_()
    return logits, torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(-1)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """Exact KL(p || q) of two tensors of logprobs."""
    return (p.exp() * (p - q)).sum()


def expected_gradient(kind: KLKind) -> Tensor:
    """The estimate's gradient, on average over tokens drawn from the policy: exactly, summed over all."""
    logits, reference = policies()
    logprobs = logits.log_softmax(-1)
    (logprobs.detach().exp() * kl_estimate(logprobs, reference, kind)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def exact_gradient(forward: bool) -> Tensor:
    logits, reference = policies()
    logprobs = logits.log_softmax(-1)
    (kl(reference, logprobs) if forward else kl(logprobs, reference)).backward()
    assert logits.grad is not None
    return logits.grad


def test_values() -> None:
    """H6: k1 and k3 average to KL(policy || reference), k2 doesn't; k1 is negative for some tokens."""
    logits, reference = policies()
    logprobs = logits.detach().log_softmax(-1)
    exact = kl(logprobs, reference).item()
    mean = {
        k: (logprobs.exp() * kl_estimate(logprobs, reference, k)).sum().item() for k in ("k1", "k2", "k3")
    }
    assert mean["k1"] == pytest.approx(exact, abs=1e-12)
    assert mean["k3"] == pytest.approx(exact, abs=1e-12)
    assert abs(mean["k2"] - exact) > 1e-3
    assert (kl_estimate(logprobs, reference, "k1") < 0).any()


def test_the_gradient_of_k1_is_zero_on_average() -> None:
    """H6: as a loss, k1 is noise: its expected gradient is 0, although the KL's is not."""
    assert expected_gradient("k1").abs().max() < 1e-15
    assert exact_gradient(forward=False).abs().max() > 1e-2


def test_the_gradient_of_k2_is_that_of_the_kl() -> None:
    """H6: k2 as a loss descends KL(policy || reference)."""
    torch.testing.assert_close(expected_gradient("k2"), exact_gradient(forward=False), rtol=0, atol=1e-14)


def test_the_gradient_of_k3_is_that_of_the_forward_kl() -> None:
    """H6: k3 as a loss descends KL(reference || policy), another direction than KL(policy || reference)."""
    torch.testing.assert_close(expected_gradient("k3"), exact_gradient(forward=True), rtol=0, atol=1e-14)
    assert (exact_gradient(forward=True) - exact_gradient(forward=False)).abs().max() > 1e-2


def test_k1_in_the_reward_gives_the_gradient_of_the_kl() -> None:
    """H6: k1, detached, as a penalty in a policy gradient is the right gradient."""
    logits, reference = policies()
    logprobs = logits.log_softmax(-1)
    penalty = kl_estimate(logprobs, reference, "k1").detach()
    (logprobs.detach().exp() * penalty * logprobs).sum().backward()
    torch.testing.assert_close(logits.grad, exact_gradient(forward=False), rtol=0, atol=1e-14)


@settings(max_examples=300, deadline=None)
@given(difference=st.floats(-80, 80), base=st.floats(-30, 0, width=32))
def test_k2_and_k3_are_never_negative(difference: float, base: float) -> None:
    """H6: not even by rounding, in float32 and float64."""
    for dtype in (torch.float32, torch.float64):
        logprobs = torch.tensor([base], dtype=dtype)
        for kind in ("k2", "k3"):
            assert kl_estimate(logprobs, logprobs + difference, kind).item() >= 0.0


def test_k3_is_never_negative_near_zero() -> None:
    """H6: every small difference of float32, where exp(d) - 1 - d cancels."""
    d = torch.logspace(-12, 0, 200_000, dtype=torch.float64).float()
    for difference in (d, -d):
        assert (kl_estimate(torch.zeros_like(d), difference, "k3") >= 0).all()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_nothing_outside_the_mask_is_read(kind: KLKind) -> None:
    """H3: NaN outside the mask reaches neither estimate nor gradient; the reference gets no gradient."""
    mask = torch.tensor([[True, False, False]])
    logprobs = torch.tensor([[-1.0, -2.0, math.nan]], requires_grad=True)
    reference = torch.tensor([[-1.5, math.nan, -3.0]], requires_grad=True)
    estimate = kl_estimate(logprobs, reference, kind, mask=mask)
    estimate.sum().backward()
    assert estimate.detach()[0, 1:].tolist() == [0.0, 0.0]
    assert estimate[0, 0] != 0
    assert logprobs.grad is not None
    assert logprobs.grad[0, 1:].tolist() == [0.0, 0.0]
    assert logprobs.grad[0, 0] != 0
    assert reference.grad is None


def test_bad_arguments() -> None:
    """An unknown estimator and shapes that would broadcast are refused."""
    with pytest.raises(RequestError, match="'k1', 'k2' or 'k3'"):
        kl_estimate(torch.zeros(2), torch.zeros(2), "k4")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="ref_logprobs"):
        kl_estimate(torch.zeros(2, 1), torch.zeros(2), "k1")
