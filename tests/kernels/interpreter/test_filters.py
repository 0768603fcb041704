"""Top-k, top-p and min-p in Triton: what stays of a row, against a float64 sort."""

import math

import pytest
import torch

from tokenspeed_rl_kernels.gpu import sample as gpu

SEEDS = torch.arange(64)


@pytest.fixture(autouse=True, params=[8192, 20], ids=["few", "many"])
def capacity(request, monkeypatch):
    """Rows that leave few candidates, which are put aside at once, and rows that leave too many."""
    monkeypatch.setattr(gpu, "CAPACITY", request.param)
    gpu.builds.cache_clear()
    yield request.param
    gpu.builds.cache_clear()


def ranks_of(values):
    """[B, V] int64: the order by (value, largest first; id, lowest first), as kernels number it."""
    bits = torch.where(values == 0, 0.0, values).view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + 2**31
    return (keys << 20) + (2**20 - 1 - torch.arange(values.shape[1]))


def kept_ids(logits, top_k, top_p, min_p, temperature=1.0):
    columns = (torch.tensor(column) for column in (top_k, top_p, min_p))
    heat = torch.full((len(logits),), temperature)
    _, peaks, floors = gpu.find_floors(logits, heat, *columns)
    assert torch.equal(peaks, logits.amax(1))
    scaled = logits if temperature == 1 else (logits - peaks[:, None]) / temperature
    kept = (ranks_of(scaled) >= floors[:, None]) & logits.isfinite()
    return [row.nonzero()[:, 0].tolist() for row in kept]


def brute_force(row, top_k, top_p, min_p):
    """Ids kept of one row, by sorting (likeliest first, then lowest id) in float64."""
    order = sorted((i for i in range(len(row)) if row[i] > -math.inf), key=lambda i: (-row[i], i))
    order = order[:top_k] if top_k > 0 else order
    weights = [math.exp(row[i] - row[order[0]]) for i in order]
    total, mass, kept = sum(weights), 0.0, []
    for i, weight in zip(order, weights, strict=True):
        if kept and top_p < 1 and mass >= top_p * total:
            break
        mass += weight
        if weight >= min_p:
            kept.append(i)
    return sorted(kept)


@pytest.mark.parametrize("vocab", [1, 7, 257, 3000])
def test_equals_brute_force(vocab):
    """F2: mixed rows, each with its own settings, keep exactly what a float64 sort would."""
    top_k = [0, 1, 5, 50, vocab + 3, 3, 0, 200]
    top_p = [1.0, 1.0, 0.9, 0.5, 0.3, 1.0, 0.95, 0.99]
    min_p = [0.0, 0.0, 0.0, 0.01, 0.0, 0.05, 0.3, 0.001]
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(8, vocab, generator=generator) * torch.linspace(0.3, 4, 8)[:, None]
    rows = zip(logits.double().tolist(), top_k, top_p, min_p, strict=True)
    assert kept_ids(logits, top_k, top_p, min_p) == [brute_force(*row) for row in rows]


def test_ties_keep_the_lowest_ids():
    """Where many logits are equal, exactly k stay, the lowest ids first; zeros of both signs are equal."""
    logits = torch.randint(-1, 2, (6, 300), generator=torch.Generator().manual_seed(0)).float()
    logits[logits == 0] *= torch.where(torch.arange(int((logits == 0).sum())) % 2 == 0, 1.0, -1.0)
    logits[5] = 0.0
    settings = [7, 120, 299, 0, 150, 0], [1.0, 1.0, 1.0, 0.25, 0.5, 0.25], [0.0, 0.0, 0.0, 0.0, 0.2, 0.0]
    kept = kept_ids(logits, *settings)
    assert kept == [brute_force(*row) for row in zip(logits.double().tolist(), *settings, strict=True)]
    assert [len(ids) for ids in kept[:3]] == [7, 120, 299] and kept[5] == list(range(75))


def test_exactly_k_at_any_temperature():
    """Dividing makes ties of unequal logits: k stay all the same."""
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(1)) + 1e4
    for temperature in (1e-30, 0.7, 1e30):
        for ids in kept_ids(logits, [40, 40], [1.0, 1.0], [0.0, 0.0], temperature=temperature):
            assert len(ids) == 40


def test_masked_tokens_stay_masked():
    """A token masked before is never counted: of two left, top-k 5 keeps two, however deep they lie."""
    logits = torch.full((2, 300), -torch.inf)
    logits[:, 280], logits[:, 7] = 1.0, torch.tensor([0.5, -3e38])
    assert kept_ids(logits, [5, 5], [0.99, 1.0], [0.0, 0.0]) == [[7, 280]] * 2


def test_rows_without_a_distribution():
    """F7: rows that are NaN, infinite or all -inf are left alone, and the search for their floors ends."""
    logits = torch.zeros(4, 300)
    logits[0, 3], logits[1, 2], logits[2] = torch.nan, torch.inf, -torch.inf
    columns = torch.full((4,), 3), torch.full((4,), 0.8), torch.full((4,), 0.1)
    floors = gpu.find_floors(logits, torch.ones(4), *columns)[2]
    assert floors[:3].tolist() == [0, 0, 0] and floors[3] > 0


def test_off():
    """Greedy rows and rows with nothing on keep everything: no floor, whatever else is set."""
    columns = (
        torch.tensor([3, 0, 300, 2**40]),
        torch.tensor([0.5, 1.0, 2.0, 1.0]),
        torch.tensor([0.1, 0, 0, 0]),
    )
    heat = torch.tensor([0.0, 1.0, 0.7, 0.7])
    assert gpu.find_floors(torch.randn(4, 300), heat, *columns)[2].tolist() == [0] * 4


def test_p_next_to_one():
    """The largest p below 1 drops at most its rounding; p of 0 keeps the likeliest."""
    logits = torch.randn(2, 600, generator=torch.Generator().manual_seed(2)) * 2
    most, one = kept_ids(logits, [0, 0], [1 - 2**-24, 0.0], [0.0, 0.0])
    dropped = logits[0].double().softmax(0)[[i for i in range(600) if i not in set(most)]].sum()
    assert dropped < 3e-7 and one == [int(logits[1].argmax())]


def test_a_large_vocabulary(capacity):
    """Sums over 131072 tokens are exact: of 8192 equal ones half stay, and the lowest ids."""
    if capacity == 20:
        pytest.skip("passes over such a row take the interpreter a second each")
    logits = torch.full((1, 131072), -80.0)
    logits[0, ::16] = 8.0
    assert kept_ids(logits, [0], [0.5], [0.0]) == [list(range(0, 16 * 4096, 16))]
