"""Draws: exact in distribution, a function of (logits, seed, position) alone, with their logprobs."""

import pytest
import torch

from tokenspeed_rl_kernels.filters import filter_logits
from tokenspeed_rl_kernels.sample import BLOCK, CASES, argmax, block_logsumexp, draw, sample, scale_logits


def columns(rows, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
    )


def chi_square(tokens, probabilities):
    """Statistic and degrees of freedom; tokens expected fewer than 5 times are taken together."""
    expected = probabilities.double() * len(tokens)
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    rare = expected < 5
    pairs = [(counts[~rare], expected[~rare])]
    if bool(rare.any()):
        pairs.append((counts[rare].sum()[None], expected[rare].sum()[None]))
    counts, expected = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    live = expected > 0
    assert not counts[~live].any()
    return float(((counts - expected)[live].square() / expected[live]).sum()), int(live.sum()) - 1


def assert_drawn_from(tokens, probabilities):
    """Five standard deviations of the statistic: a true sampler fails once in a million."""
    statistic, freedom = chi_square(tokens, probabilities)
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5 + 10


@pytest.mark.parametrize("vocab", [2, 7, 256, 257, 600])
@pytest.mark.parametrize("by", ["seed", "position"])
def test_draws_follow_the_distribution(vocab, by):
    """Over seeds, and over positions of one seed, tokens are drawn with exactly their probabilities."""
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    count = torch.arange(20_000)
    constant = torch.full_like(count, 11)
    seeds, positions = (count, constant) if by == "seed" else (constant, count)
    pairs = zip(seeds.split(5000), positions.split(5000), strict=True)
    tokens = torch.cat([draw(logits.expand(5000, -1), *pair) for pair in pairs])
    assert_drawn_from(tokens, logits.double().softmax(0))


def test_rare_tokens_are_drawn_as_often_as_they_should():
    """A token of probability 1e-3 in a block of its own, beside a block that holds nearly everything."""
    logits = torch.full((300,), -30.0)
    logits[5], logits[299] = 0.0, torch.log(torch.tensor(1e-3))
    count = torch.arange(40_000)
    tokens = draw(logits.expand(40_000, -1), count, torch.zeros_like(count))
    assert abs(int((tokens == 299).sum()) - 40) < 5 * 40**0.5
    assert set(tokens.tolist()) <= {5, 299}


def test_filtered_draws_follow_the_filtered_distribution():
    """F2: with every filter on, the draw is from the renormalised rest, and nothing else is ever drawn."""
    logits = torch.randn(600, generator=torch.Generator().manual_seed(3)) * 2
    count = torch.arange(20_000)
    parts = []
    for seeds in count.split(5000):
        settings = columns(5000, temperature=0.8, top_k=20, top_p=0.9, min_p=0.02)
        parts.append(sample(logits.expand(5000, -1), *settings, seeds, torch.zeros(5000).long()).tokens)
    kept = filter_logits(logits[None] / 0.8, torch.tensor([20]), torch.tensor([0.9]), torch.tensor([0.02]))
    assert_drawn_from(torch.cat(parts), kept[0].double().softmax(0))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_row_alone_equals_the_row_in_a_batch(case):
    """F4, F12: a draw is the same alone and in any place of any batch; its logprobs are, to rounding."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(case.rows, case.vocab, generator=generator) * 3
    options = {"temperature": case.temperature, "top_k": case.top_k, "top_p": case.top_p, "min_p": case.min_p}
    seeds, positions = torch.arange(case.rows) * 977 - 5, torch.arange(case.rows) + 100
    together = sample(logits, *columns(case.rows, **options), seeds, positions)
    for row in range(case.rows):
        alone = sample(logits[row, None], *columns(1, **options), seeds[row, None], positions[row, None])
        assert torch.equal(alone.tokens, together.tokens[row, None])
        for ours, theirs in zip(alone[1:], together[1:], strict=True):
            torch.testing.assert_close(ours, theirs[row, None], rtol=0, atol=2e-6)
    order = torch.arange(case.rows - 1, -1, -1)
    shuffled = sample(logits[order], *columns(case.rows, **options), seeds[order], positions[order])
    assert torch.equal(shuffled.tokens, together.tokens[order])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logprobs_of_all_three_kinds(case):
    """F1, F2, F3: raw, sampling, processed are log-softmaxes of logits, logits / T, what is drawn from."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(case.rows, case.vocab, generator=generator) * 3
    options = {"temperature": case.temperature, "top_k": case.top_k, "top_p": case.top_p, "min_p": case.min_p}
    settings = columns(case.rows, **options)
    out = sample(logits, *settings, torch.arange(case.rows), torch.zeros(case.rows).long())
    exact = logits.double()
    scaled = exact / (case.temperature or 1.0)
    kept = filter_logits(scaled.float(), *settings[1:]) if case.temperature else scaled
    for ours, of in zip(out[1:], (exact, scaled, kept.double()), strict=True):
        expected = of.log_softmax(1).gather(1, out.tokens[:, None])[:, 0]
        torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-5)
    if case.temperature == 0:
        assert torch.equal(out.tokens, logits.argmax(1))


def test_a_mixed_batch_equals_its_rows():
    """Greedy, plain, scaled and filtered rows in one batch are each what they are alone."""
    logits = torch.randn(5, 700, generator=torch.Generator().manual_seed(4)) * 3
    settings = (
        torch.tensor([0.0, 1.0, 0.6, 1.4, 1e-30]),
        torch.tensor([5, 0, 0, 30, 0]),
        torch.tensor([0.5, 1.0, 1.0, 0.8, 1.0]),
        torch.tensor([0.9, 0.0, 0.0, 0.01, 0.0]),
        torch.arange(5),
        torch.arange(5) + 9,
    )
    together = sample(logits, *settings)
    for row in range(5):
        alone = sample(logits[row, None], *(column[row, None] for column in settings))
        for ours, theirs in zip(alone, together, strict=True):
            torch.testing.assert_close(ours, theirs[row, None], rtol=0, atol=2e-6)
    assert together.tokens[4] == logits[4].argmax()


def test_ties():
    """Greedy takes the lowest id; a draw of equal logits takes each equally often."""
    logits = torch.zeros(1, 2 * BLOCK + 3)
    logits[0, [BLOCK + 1, BLOCK, 2 * BLOCK + 2]] = 1.0
    assert argmax(logits).tolist() == [BLOCK]
    tail = torch.zeros(1, BLOCK + 2)
    tail[0, -1] = 1.0
    assert argmax(tail).tolist() == [BLOCK + 1]
    count = torch.arange(20_000)
    assert_drawn_from(draw(torch.zeros(20_000, 5), count, count), torch.full((5,), 0.2))


@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 1000])
def test_blocked_reductions(vocab):
    """The blocked argmax and log-sum-exp are torch's, for any vocabulary."""
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(0)) * 5
    assert torch.equal(argmax(logits), logits.argmax(1))
    exact = logits.double().logsumexp(1)
    torch.testing.assert_close(block_logsumexp(logits).logsumexp(1).double(), exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_rows_that_nothing_can_be_drawn_from(temperature):
    """F7: NaN, all -inf or +inf logits give token -1 and NaN logprobs, and leave the other rows alone."""
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(5))
    broken = logits.clone()
    broken[0] = torch.nan
    broken[1, 17] = torch.nan
    broken[2] = -torch.inf
    broken[3, 3] = torch.inf
    settings = (*columns(5, temperature=temperature, top_p=0.9), torch.arange(5), torch.arange(5))
    out, fine = sample(broken, *settings), sample(logits, *settings)
    assert out.tokens[:4].tolist() == [-1] * 4
    assert all(logprob[:4].isnan().all() for logprob in out[1:])
    for ours, theirs in zip(out, fine, strict=True):
        assert torch.equal(ours[4], theirs[4])


def test_one_possible_token():
    """One finite logit is drawn with logprob 0, wherever it stands."""
    for place in (0, 255, 256, 299):
        logits = torch.full((1, 300), -torch.inf)
        logits[0, place] = -50.0
        out = sample(logits, *columns(1), torch.tensor([3]), torch.tensor([4]))
        assert out.tokens.tolist() == [place] and out.logprob_raw.tolist() == [0.0]


def test_tiny_temperatures_don_t_overflow():
    """Dividing by 1e-38 gives the argmax with logprob 0, not infinity."""
    logits = torch.tensor([[50.0, 49.0, -3.0]])
    assert scale_logits(logits, torch.tensor([1e-38])).tolist()[0][0] == 0.0
    out = sample(logits, *columns(1, temperature=1e-38), torch.tensor([0]), torch.tensor([0]))
    assert out.tokens.tolist() == [0] and out.logprob_sampling.tolist() == [0.0]


def test_global_random_state_is_left_alone():
    """F14: drawing neither reads nor advances torch's generator."""
    state = torch.get_rng_state()
    first = draw(torch.zeros(4, 50), torch.arange(4), torch.arange(4))
    torch.manual_seed(123)
    again = draw(torch.zeros(4, 50), torch.arange(4), torch.arange(4))
    torch.set_rng_state(state)
    draw(torch.zeros(4, 50), torch.arange(4), torch.arange(4))
    assert torch.equal(first, again) and torch.equal(torch.get_rng_state(), state)


def test_draws_are_pinned():
    """A draw is part of the contract with whoever resumes a run: this one never changes."""
    logits = torch.linspace(-2, 2, 1000).repeat(6, 1)
    seeds = torch.tensor([0, 0, 1, -1, 2**62, -(2**63)])
    tokens = draw(logits, seeds, torch.tensor([0, 1, 0, 0, 5, 10**9]))
    assert tokens.tolist() == [814, 677, 797, 718, 929, 369]


def test_misfits_are_refused():
    """A column of another length raises ValueError with the shapes it got; logits must be float32."""
    settings = [*columns(3), torch.arange(3), torch.arange(3)]
    for place in range(6):
        with pytest.raises(ValueError, match="shapes misfit: got logits"):
            sample(torch.zeros(3, 5), *settings[:place], settings[place][1:], *settings[place + 1 :])
    with pytest.raises(ValueError, match=r"dtypes misfit: got \(torch.bfloat16.* pass float32"):
        sample(torch.zeros(3, 5, dtype=torch.bfloat16), *settings)
