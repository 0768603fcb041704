"""Losses against loops over plain floats, and against themselves when the batch is split."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.rl.losses import policy_loss, value_loss
from tokenspeed_rl.rl.masked import masked_mean, masked_sum
from tokenspeed_rl.rl.metrics import Metrics

ROWS, LENGTH = 8, 6


def batch(seed: int = 0) -> dict[str, Tensor]:
    """Float64 tensors [8, 6]; the mask leaves rows of different length, and one row without actions."""
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64)

    mask = torch.rand(ROWS, LENGTH, generator=generator) < 0.6
    mask[5] = False
    return {
        "old": -draw().abs(),
        "shift": draw(0.4),
        "advantages": draw(),
        "values": draw(),
        "old_values": draw(),
        "returns": draw(),
        "mask": mask,
    }


def masked_rows(b: dict[str, Tensor], *names: str) -> list[tuple[float, ...]]:
    """The entries under the mask, as plain floats."""
    return list(zip(*(b[name][b["mask"]].tolist() for name in names), strict=True))


def test_policy_loss_equals_its_definition() -> None:
    """Loss, gradient and metrics are those of PPO's clipped objective, action by action."""
    b, low, high, denominator = batch(), 0.2, 0.3, 17.0
    logprobs = (b["old"] + b["shift"]).requires_grad_()
    loss, metrics = policy_loss(
        logprobs, b["old"], b["advantages"], b["mask"], clip_low=low, clip_high=high, denominator=denominator
    )
    loss.backward()
    terms, gradients, clipped, ratios = [], [], 0, []
    for shift, advantage in masked_rows(b, "shift", "advantages"):
        ratio = math.exp(shift)
        kept = min(max(ratio, 1 - low), 1 + high)
        terms.append(-min(ratio * advantage, kept * advantage))
        hit = kept * advantage < ratio * advantage
        clipped += hit
        gradients.append(0.0 if hit else -advantage * ratio / denominator)
        ratios.append(ratio)
    count = len(terms)
    assert loss.item() == pytest.approx(math.fsum(terms) / denominator, rel=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad[b["mask"]].tolist() == pytest.approx(gradients, rel=1e-12)
    assert not logprobs.grad[~b["mask"]].any()
    assert 0 < clipped < count
    computed = computed_metrics(metrics)
    assert computed == pytest.approx(
        {
            "policy_loss": math.fsum(terms) / count,
            "clip_fraction": clipped / count,
            "approx_kl": math.fsum(r - 1 - math.log(r) for r in ratios) / count,
            "ratio": math.fsum(ratios) / count,
            "ratio_max": max(ratios),
        },
        rel=1e-12,
    )


@pytest.mark.parametrize("clip", [None, 0.3])
def test_value_loss_equals_its_definition(clip: float | None) -> None:
    """Loss, gradient and metrics are those of PPO's clipped squared error, action by action."""
    b, denominator = batch(), 17.0
    values = b["values"].clone().requires_grad_()
    loss, metrics = value_loss(
        values, b["old_values"], b["returns"], b["mask"], clip=clip, denominator=denominator
    )
    loss.backward()
    terms, gradients, hits = [], [], 0
    for value, old, target in masked_rows(b, "values", "old_values", "returns"):
        kept = value if clip is None else min(max(value, old - clip), old + clip)
        plain, clipped = (value - target) ** 2, (kept - target) ** 2
        terms.append(max(plain, clipped) / 2)
        hits += clipped > plain
        gradients.append((0.0 if clipped > plain else value - target) / denominator)
    assert loss.item() == pytest.approx(math.fsum(terms) / denominator, rel=1e-12)
    assert values.grad is not None
    assert values.grad[b["mask"]].tolist() == pytest.approx(gradients, rel=1e-12, abs=1e-15)
    computed = computed_metrics(metrics)
    assert computed["value_loss"] == pytest.approx(math.fsum(terms) / len(terms), rel=1e-12)
    assert computed["value_clip_fraction"] == hits / len(terms)
    assert (hits > 0) == (clip is not None)
    assert computed["value"] == pytest.approx(b["values"][b["mask"]].mean().item(), rel=1e-12)
    assert computed["return"] == pytest.approx(b["returns"][b["mask"]].mean().item(), rel=1e-12)


def computed_metrics(*parts: dict[str, Tensor]) -> dict[str, float]:
    metrics = Metrics()
    for part in parts:
        metrics.update(part)
    return metrics.compute()


def train_step(b: dict[str, Tensor], ranks: list[list[Tensor]]) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, averaged gradient and metrics of one step, as under DDP: `ranks` holds rows per micro-batch."""
    denominator = b["mask"].sum().item() / len(ranks)
    total, gradient, parts = 0.0, torch.zeros(LENGTH, dtype=torch.float64), []
    for micro_batches in ranks:
        weight = torch.linspace(0.5, 1.5, LENGTH, dtype=torch.float64).requires_grad_()
        for rows in micro_batches:
            part = {name: tensor[rows] for name, tensor in b.items()}
            mask = part["mask"]
            loss, policy = policy_loss(
                part["old"] + part["shift"] * weight,
                part["old"],
                part["advantages"],
                mask,
                clip_low=0.2,
                clip_high=0.2,
                denominator=denominator,
            )
            value, values = value_loss(
                part["values"] * weight,
                part["old_values"],
                part["returns"],
                mask,
                clip=0.5,
                denominator=denominator,
            )
            (loss + 0.5 * value).backward()
            total += (loss + 0.5 * value).item() / len(ranks)
            parts += [policy, values]
        assert weight.grad is not None
        gradient += weight.grad / len(ranks)
    return total, gradient, computed_metrics(*parts)


SPLITS: dict[str, list[list[list[int]]]] = {
    "2 micro-batches": [[[0, 1, 2, 3], [4, 5, 6, 7]]],
    "4 micro-batches": [[[0, 1], [2, 3], [4, 5], [6, 7]]],
    "uneven micro-batches, one all masked": [[[5], [7, 0, 3], [1], [6, 2, 4]]],
    "2 ranks": [[[0, 1, 2, 3]], [[4, 5, 6, 7]]],
    "2 ranks x 2 micro-batches": [[[0, 2], [4, 6]], [[1, 3], [5, 7]]],
    "2 ranks, one all masked": [[[0, 1, 2, 3], [4, 6, 7]], [[5]]],
}


@pytest.mark.parametrize("split", SPLITS)
def test_any_split_gives_the_same_step(split: str) -> None:
    """H1: micro-batches x ranks, even or not, give the loss, gradient and metrics of the whole batch."""
    b = batch(1)
    loss, gradient, metrics = train_step(b, [[torch.arange(ROWS)]])
    rows = [[torch.tensor(part) for part in rank] for rank in SPLITS[split]]
    split_loss, split_gradient, split_metrics = train_step(b, rows)
    assert split_loss == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(split_gradient, gradient, rtol=1e-12, atol=1e-14)
    assert split_metrics == pytest.approx(metrics, rel=1e-12)
    assert 0 < metrics["clip_fraction"] < 1


def losses(b: dict[str, Tensor], mask: Tensor, denominator: float) -> dict[str, Any]:
    inputs = {name: b[name].clone().requires_grad_() for name in ("shift", "values")}
    policy, policy_metrics = policy_loss(
        b["old"] + inputs["shift"],
        b["old"],
        b["advantages"],
        mask,
        clip_low=0.2,
        clip_high=0.2,
        denominator=denominator,
    )
    value, value_metrics = value_loss(
        inputs["values"], b["old_values"], b["returns"], mask, clip=0.2, denominator=denominator
    )
    (policy + value).backward()
    numbers = {
        "policy": policy.item(),
        "value": value.item(),
        **computed_metrics(policy_metrics, value_metrics),
    }
    return {"numbers": numbers, "gradients": [x.grad for x in inputs.values()]}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["old", "shift", "advantages", "values", "old_values", "returns", "all"])
def test_nothing_outside_the_mask_is_read(bad: float, name: str) -> None:
    """H3: NaN or inf outside the mask, in any tensor, changes neither loss, gradient nor metrics by a bit."""
    b = batch(2)
    names = b.keys() - {"mask"} if name == "all" else {name}
    dirty = {n: torch.where(b["mask"], x, bad) if n in names else x for n, x in b.items()}
    clean, got = losses(b, b["mask"], 20.0), losses(dirty, b["mask"], 20.0)
    assert got["numbers"] == clean["numbers"]
    for gradient, wanted in zip(got["gradients"], clean["gradients"], strict=True):
        assert torch.equal(gradient, wanted)


def test_everything_masked_is_zero() -> None:
    """H3, G5: a fully masked batch gives loss 0, gradients 0 and metrics 0, and backward still runs."""
    b = batch()
    got = losses(b, torch.zeros_like(b["mask"]), 0.0)
    assert set(got["numbers"].values()) == {0.0}
    assert not any(gradient.any() for gradient in got["gradients"])


def test_the_first_on_policy_step() -> None:
    """H7: before any update ratio == 1 exactly, nothing is clipped, KL is 0, and the gradient is -A / N."""
    b = batch()
    logprobs = b["old"].float().requires_grad_()
    count = int(b["mask"].sum())
    loss, metrics = policy_loss(
        logprobs, logprobs, b["advantages"].float(), b["mask"], clip_low=0.2, clip_high=0.2, denominator=count
    )
    loss.backward()
    computed = computed_metrics(metrics)
    assert computed["ratio"] == computed["ratio_max"] == 1.0
    assert computed["clip_fraction"] == computed["approx_kl"] == 0.0
    advantages = torch.where(b["mask"], b["advantages"].float(), 0.0)
    assert loss.item() == pytest.approx(-advantages.sum().item() / count, rel=1e-6)
    torch.testing.assert_close(logprobs.grad, -advantages / count)


def test_huge_log_ratios_do_not_overflow() -> None:
    """A policy that ran away gives a large, finite loss (0 where the advantage is 0), not inf - inf."""
    old = torch.tensor([[-200.0, -200.0, -200.0, 0.0]])
    logprobs = torch.tensor([[0.0, 0.0, 0.0, -torch.inf]], requires_grad=True)
    advantages = torch.tensor([[0.0, -1.0, 1.0, 1.0]])
    loss, metrics = policy_loss(
        logprobs,
        old,
        advantages,
        torch.ones(1, 4, dtype=torch.bool),
        clip_low=0.2,
        clip_high=0.2,
        denominator=4,
    )
    loss.backward()
    assert loss.isfinite()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()
    assert metrics["ratio_max"].item() == pytest.approx(math.exp(20))


def test_half_precision_is_widened() -> None:
    """bfloat16 logprobs and values give float32 losses, equal to those of the same numbers in float32."""
    b = {n: x if n == "mask" else x.bfloat16() for n, x in batch().items()}
    wide = {n: x if n == "mask" else x.float() for n, x in b.items()}
    for inputs in (("old", "shift", "advantages"), ("values", "old_values", "returns")):
        extra: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2} if "shift" in inputs else {"clip": 0.2}
        function: Any = policy_loss if "shift" in inputs else value_loss
        got, expected = (
            function(*(source[name] for name in inputs), b["mask"], **extra, denominator=9)[0]
            for source in (b, wide)
        )
        assert got.dtype == torch.float32
        assert got.item() == expected.item()


@pytest.mark.parametrize("denominator", [0.0, -1.0, math.nan, math.inf, torch.tensor(0)])
def test_a_denominator_that_is_no_count_is_refused(denominator: float | Tensor) -> None:
    """Dividing by 0 where there are actions is a mistake of the caller's, named as such."""
    with pytest.raises(RequestError, match="2 actions"):
        masked_mean(torch.ones(1, 3), torch.tensor([[True, True, False]]), denominator)


def test_bad_settings_are_refused() -> None:
    """Clip ranges that aren't any, and tensors that would broadcast, are errors naming the argument."""
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for low, high in ((-0.1, 0.2), (1.1, 0.2), (0.2, -0.1), (math.nan, 0.2)):
        with pytest.raises(RequestError, match="clip_low"):
            policy_loss(x, x, x, mask, clip_low=low, clip_high=high, denominator=1)
    with pytest.raises(RequestError, match="clip must be positive"):
        value_loss(x, x, x, mask, clip=0.0, denominator=1)
    with pytest.raises(RequestError, match="advantages must have the mask's shape"):
        policy_loss(x, x, x[:, :1], mask, clip_low=0.2, clip_high=0.2, denominator=1)
    with pytest.raises(RequestError, match="x must have the mask's shape"):
        masked_sum(x[0], mask)
