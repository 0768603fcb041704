"""Top-k, top-p and min-p against a brute-force float64 sampler."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_rl_kernels import filters
from tokenspeed_rl_kernels.filters import filter_logits


def brute_force(row, top_k, top_p, min_p):
    """Ids kept of one row, by sorting (likeliest first, then lowest id) in float64."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    order = [i for i in order if row[i] > -math.inf]
    if top_k > 0:
        order = order[:top_k]
    weights = [math.exp(row[i] - row[order[0]]) for i in order]
    total, mass, kept = sum(weights), 0.0, []
    for i, weight in zip(order, weights, strict=True):
        if kept and top_p < 1 and mass >= top_p * total:
            break
        kept.append(i)
        mass += weight
    return sorted(i for i, weight in zip(order, weights, strict=True) if i in set(kept) and weight >= min_p)


def kept_ids(logits, top_k, top_p, min_p):
    columns = (torch.tensor(column) for column in (top_k, top_p, min_p))
    kept = filter_logits(logits, *columns)
    assert torch.equal(kept[kept.isfinite()], logits[kept.isfinite()])
    return [row.isfinite().nonzero()[:, 0].tolist() for row in kept]


@pytest.mark.parametrize("vocab", [5, 300, 3000])
@pytest.mark.parametrize("seed", range(3))
def test_equals_brute_force(vocab, seed):
    """F2: mixed rows, each with its own settings, keep exactly what a float64 sort would."""
    generator = torch.Generator().manual_seed(seed)
    top_k = [0, 1, 5, 50, vocab, vocab + 3, -1, 3, 0, 2000, 0]
    top_p = [1.0, 1.0, 0.9, 0.5, 0.3, 0.999, 0.7, 1.0, 0.95, 0.99, 1.0]
    min_p = [0.0, 0.0, 0.0, 0.01, 0.0, 0.0, 0.2, 0.05, 0.0, 0.001, 0.3]
    logits = torch.randn(len(top_k), vocab, generator=generator) * torch.linspace(0.3, 4, len(top_k))[:, None]
    rows = zip(logits.double().tolist(), top_k, top_p, min_p, strict=True)
    assert kept_ids(logits, top_k, top_p, min_p) == [brute_force(*row) for row in rows]


@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=40),
    st.integers(-1, 45),
    st.sampled_from([0.05, 0.3, 0.45, 0.81, 1.0]),
    st.sampled_from([0.0, 0.07, 0.4, 1.0]),
)
def test_ties_keep_the_lowest_ids(values, top_k, top_p, min_p):
    """Where many logits are equal, exactly k stay, the lowest ids first."""
    logits = torch.tensor([values], dtype=torch.float32)
    expected = brute_force([float(v) for v in values], top_k, top_p, min_p)
    assert kept_ids(logits, [top_k], [top_p], [min_p]) == [expected]


@pytest.mark.parametrize("candidates", [1, 2, 10])
def test_rows_that_need_a_full_sort(candidates, monkeypatch):
    """A nucleus wider than the candidates is found all the same, also beside rows that don't need it."""
    monkeypatch.setattr(filters, "CANDIDATES", candidates)
    logits = torch.cat(
        (torch.randn(2, 500, generator=torch.Generator().manual_seed(0)) * 0.1, torch.zeros(1, 500))
    )
    logits[1, 7] = 30.0
    settings = [0, 0, 0], [0.9, 0.9, 0.5], [0.0, 0.0, 0.0]
    rows = zip(logits.double().tolist(), *settings, strict=True)
    assert kept_ids(logits, *settings) == [brute_force(*row) for row in rows]


def test_exactly_k_of_a_large_k(monkeypatch):
    """A top-k beyond what torch.topk is used for keeps exactly k."""
    monkeypatch.setattr(filters, "LARGEST_TOPK", 20)
    logits = torch.arange(200).float().div(2).floor()[None]
    assert kept_ids(logits, [101], [1.0], [0.0]) == [[98, *range(100, 200)]]


def test_a_large_vocabulary():
    """Sums over 131072 tokens don't drift: a flat row keeps p of it, to one in ten thousand."""
    logits = torch.zeros(1, 131072)
    kept = kept_ids(logits, [0], [0.25], [0.0])[0]
    assert abs(len(kept) - 32768) <= 4 and kept == list(range(len(kept)))


def test_nothing_on_is_free():
    """Without a filter the logits come back themselves, uncopied."""
    logits = torch.randn(3, 10)
    out = filter_logits(logits, torch.tensor([0, -1, 10]), torch.ones(3), torch.zeros(3))
    assert out is logits


def test_the_input_is_not_written():
    """Filtering leaves the caller's logits, from which other logprobs come, as they were."""
    logits = torch.randn(3, 10)
    before = logits.clone()
    filter_logits(
        logits, torch.tensor([2, 0, 0]), torch.tensor([1.0, 0.5, 1.0]), torch.tensor([0.0, 0.0, 0.9])
    )
    assert torch.equal(logits, before)


def test_rows_without_a_distribution():
    """F7: rows that are NaN or all -inf don't disturb their neighbours, and stay as they are."""
    logits = torch.randn(4, 10)
    logits[0, 3] = torch.nan
    logits[1] = -torch.inf
    on = torch.tensor([3, 3, 3, 0]), torch.full((4,), 0.8), torch.full((4,), 0.1)
    kept = filter_logits(logits, *on)
    assert kept[0].isnan()[3] and torch.equal(kept[1], logits[1])
    assert torch.equal(kept[2:], filter_logits(logits[2:], *(column[2:] for column in on)))


def test_masked_tokens_stay_masked():
    """A token masked before is never counted: of two left, top-k 5 keeps two."""
    logits = torch.full((1, 10), -torch.inf)
    logits[0, [2, 7]] = torch.tensor([1.0, 2.0])
    assert kept_ids(logits, [5], [1.0], [0.0]) == [[2, 7]]
