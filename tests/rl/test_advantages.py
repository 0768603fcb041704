"""Advantages against definitions written out in float64."""

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_rl.errors import ConfigError, RequestError
from tokenspeed_rl.rl.advantages import gae, group_advantages, require_group, terminal_rewards, whiten

NAN = math.nan


def gae_by_definition(
    rewards: list[float], values: list[float], mask: list[bool], gamma: float, lam: float
) -> list[float]:
    """A_t = sum over later actions l of (gamma lam)^l delta_{t+l}, over the list of actions alone."""
    actions = [t for t, chosen in enumerate(mask) if chosen]
    r, v = [rewards[t] for t in actions], [values[t] for t in actions] + [0.0]
    deltas = [r[k] + gamma * v[k + 1] - v[k] for k in range(len(actions))]
    advantages = [0.0] * len(mask)
    for k, t in enumerate(actions):
        advantages[t] = math.fsum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, len(actions)))
    return advantages


numbers = st.floats(-5, 5, width=32)
row = st.lists(st.tuples(numbers, numbers, st.booleans()), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(row=row, gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_equals_its_definition(row: list[tuple[float, float, bool]], gamma: float, lam: float) -> None:
    """GAE is the discounted sum of TD errors over a row's actions, whatever lies between them."""
    rewards, values, mask = (list(column) for column in zip(*row, strict=True))
    advantages, returns = gae(
        torch.tensor([rewards], dtype=torch.float64),
        torch.tensor([values], dtype=torch.float64),
        torch.tensor([mask]),
        gamma=gamma,
        lam=lam,
    )
    expected = gae_by_definition(rewards, values, mask, gamma, lam)
    assert advantages[0].tolist() == pytest.approx(expected, abs=1e-9)
    expected_returns = [a + v if m else 0.0 for a, v, m in zip(expected, values, mask, strict=True)]
    assert returns[0].tolist() == pytest.approx(expected_returns, abs=1e-9)


def test_observations_between_turns_get_no_credit_and_cost_none() -> None:
    """H5: [a, a, o, o, a, a] with the reward at the end: actions have their credit, observations none."""
    mask = torch.tensor([[True, True, False, False, True, True]])
    rewards = terminal_rewards(torch.tensor([1.0]), mask)
    values = torch.tensor([[0.1, 0.2, 7.0, -7.0, 0.3, 0.4]])
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    alone = torch.ones(1, 4, dtype=torch.bool)
    without, _ = gae(
        terminal_rewards(torch.tensor([1.0]), alone), values[mask][None], alone, gamma=0.9, lam=0.8
    )
    assert advantages[mask].tolist() == without[0].tolist()
    assert (advantages[mask] != 0).all()
    assert advantages[~mask].tolist() == returns[~mask].tolist() == [0.0, 0.0]

    undiscounted, _ = gae(rewards, torch.zeros(1, 6), mask, gamma=1.0, lam=1.0)
    assert undiscounted.tolist() == [[1.0, 1.0, 0.0, 0.0, 1.0, 1.0]]


def test_gae_reads_nothing_outside_the_mask() -> None:
    """H3: NaN in prompt, observation and padding leaks nowhere; a row without actions is all 0."""
    mask = torch.tensor([[False, True, False, True, False], [False] * 5])
    clean_rewards, clean_values = torch.rand(2, 5), torch.rand(2, 5)
    dirty = [torch.where(mask, x, NAN) for x in (clean_rewards, clean_values)]
    for got, expected in zip(
        gae(*dirty, mask, gamma=0.9, lam=0.9),
        gae(clean_rewards, clean_values, mask, gamma=0.9, lam=0.9),
        strict=True,
    ):
        assert torch.equal(got, expected)
        assert got[1].tolist() == [0.0] * 5


def test_gae_carries_no_gradient_and_widens_half_precision() -> None:
    """Advantages are constants to the losses, and computed in float32 at least."""
    values = torch.rand(1, 3, dtype=torch.bfloat16, requires_grad=True)
    advantages, returns = gae(
        torch.ones(1, 3), values, torch.ones(1, 3, dtype=torch.bool), gamma=1.0, lam=1.0
    )
    assert advantages.dtype == returns.dtype == torch.float32
    assert not advantages.requires_grad
    assert not returns.requires_grad


@pytest.mark.parametrize(
    "setting", [{"gamma": 1.1, "lam": 1.0}, {"gamma": 1.0, "lam": -0.1}, {"gamma": NAN, "lam": 1}]
)
def test_gae_refuses_weights_outside_their_range(setting: dict[str, float]) -> None:
    """A discount past 1 is refused, not run into divergence."""
    with pytest.raises(RequestError, match=r"must be in 0 \.\. 1"):
        gae(torch.ones(1, 2), torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), **setting)


def test_terminal_reward_is_at_the_last_action() -> None:
    """H12: a reward lands on the last action (EOS included), never on padding; without an action, nowhere."""
    mask = torch.tensor([[False, True, True, False], [True, False, True, True], [False] * 4, [True] * 4])
    got = terminal_rewards(torch.tensor([2.0, 3.0, 5.0, NAN]), mask)
    assert got.tolist() == [[0, 0, 2.0, 0], [0, 0, 0, 3.0], [0.0] * 4, [0.0] * 4]


@settings(max_examples=60, deadline=None)
@given(value=st.floats(-1e6, 1e6), size=st.integers(2, 30), scale=st.sampled_from(["std", "none"]))
def test_constant_groups_have_exactly_no_advantage(value: float, size: int, scale: Any) -> None:
    """H2: equal rewards teach nothing, down to the last bit, whatever their value and number."""
    for dtype in (torch.float32, torch.float64):
        rewards = torch.full((size,), value, dtype=dtype)
        for eps in (1e-6, 0.0):
            assert not group_advantages(rewards, torch.zeros(size), scale=scale, eps=eps).any()


@pytest.mark.parametrize("rewards", [[0.35] * 7, [0.4] * 7])
def test_constant_groups_of_the_acceptance_row(rewards: list[float]) -> None:
    """H2: [0.35] * 7 and [0.4] * 7, whose floating-point mean is not the value, give exactly 0."""
    assert group_advantages(torch.tensor(rewards), torch.zeros(7, dtype=torch.int64)).tolist() == [0.0] * 7


def group_by_definition(rewards: list[float], eps: float) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return [(r - mean) / (deviation + eps) for r in rewards]


def test_close_rewards_equal_the_two_pass_reference() -> None:
    """H2: [1, 1.00001], where one-pass variance loses every digit."""
    rewards = torch.tensor([1.0, 1.00001])
    expected = group_by_definition(rewards.double().tolist(), 1e-6)
    assert group_advantages(rewards, torch.tensor([4, 4])).tolist() == pytest.approx(expected, rel=1e-6)
    assert expected[1] > 0.6


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=9), min_size=1, max_size=5),
    order=st.randoms(use_true_random=False),
)
def test_group_advantages_equal_their_definition(groups: list[list[float]], order: Any) -> None:
    """Every group is compared with itself alone, whatever its label, size and place in the batch."""
    eps = 1e-6
    entries = [
        (reward, 10 * g - 7, wanted)
        for g, rewards in enumerate(groups)
        for reward, wanted in zip(rewards, group_by_definition(rewards, eps), strict=True)
    ]
    order.shuffle(entries)
    rewards, labels, expected = zip(*entries, strict=True)
    got = group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(labels), eps=eps)
    # abs: where all differences are rounding, the definition's are too.
    assert got.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_group_statistics_do_not_depend_on_who_shares_the_batch() -> None:
    """H9: 45 prompts of 8 samples on two ranks (23 and 22 prompts): the same advantages as on one."""
    rewards = torch.rand(45 * 8, generator=torch.Generator().manual_seed(0))
    groups = torch.arange(45).repeat_interleave(8)
    cut = 23 * 8
    halves = [group_advantages(rewards[part], groups[part]) for part in (slice(cut), slice(cut, None))]
    assert torch.equal(torch.cat(halves), group_advantages(rewards, groups))


def test_samples_without_reward_are_left_out_of_their_group() -> None:
    """H4: an abstained sample (NaN) gets 0 and moves nobody's advantage; a reward of 0.0 counts."""
    with_abstained = group_advantages(torch.tensor([1.0, NAN, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 1, 1]))
    without = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1]))
    assert with_abstained[1] == 0.0
    assert torch.equal(with_abstained[torch.tensor([0, 2, 3, 4])], without)
    assert without[1] != 0.0
    assert (
        group_advantages(torch.tensor([NAN, NAN, 1.0, NAN]), torch.tensor([0, 0, 1, 1])).tolist() == [0.0] * 4
    )


def test_unscaled_group_advantages() -> None:
    """scale="none" is the reward minus the group's mean; integer rewards give floats."""
    got = group_advantages(torch.tensor([1, 2, 6]), torch.tensor([3, 3, 3]), scale="none")
    assert got.dtype == torch.float32
    assert got.tolist() == [-2.0, -1.0, 3.0]


def test_groups_of_one_are_refused() -> None:
    """H10: where samples are compared, a group of one is an error at once, not a run that learns nothing."""
    with pytest.raises(RequestError, match="one in group 7"):
        group_advantages(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2, 2, 7]))
    with pytest.raises(ConfigError, match="at least 2"):
        require_group(1)
    require_group(2)


def test_group_advantages_refuse_what_they_do_not_know() -> None:
    """An unknown scale and mismatched shapes are errors, not defaults."""
    with pytest.raises(RequestError, match="'std' or 'none'"):
        group_advantages(torch.ones(2), torch.zeros(2), scale="max")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="rewards must have"):
        group_advantages(torch.ones(2), torch.zeros(3))


@settings(max_examples=40, deadline=None)
@given(entries=st.lists(st.tuples(st.floats(-100, 100, width=32), st.booleans()), min_size=1, max_size=20))
def test_whiten_equals_its_definition(entries: list[tuple[float, bool]]) -> None:
    """Mean 0 and standard deviation 1 over the mask, 0 elsewhere, NaN elsewhere ignored."""
    inside = [x for x, chosen in entries if chosen]
    x = torch.tensor([[x if chosen else NAN for x, chosen in entries]], dtype=torch.float64)
    got = whiten(x, torch.tensor([[chosen for _, chosen in entries]]), eps=1e-6)[0].tolist()
    mean = statistics.fmean(inside) if inside else 0.0
    scale = math.sqrt((statistics.pvariance(inside) if inside else 0.0) + 1e-6)
    expected = [(x - mean) / scale if chosen else 0.0 for x, chosen in entries]
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_whiten_of_nothing_one_or_equals_is_zero(eps: float) -> None:
    """H3: everything masked, one entry and equal entries give exactly 0, not 0/0 and no rounding."""
    for value in (0.1, 0.35, 0.4, 1e6 / 3):
        x = torch.full((7, 3), value, dtype=torch.float64)
        for count in range(22):
            mask = (torch.arange(21) < count).view(7, 3)
            assert not whiten(x, mask, eps=eps).any()
