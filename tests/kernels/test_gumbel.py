"""Noise from counters: the right numbers, the right distribution, no collisions."""

import math

import torch

from tokenspeed_rl_kernels.gumbel import GOLDEN, gumbel, mix, row_keys, substream

MASK = 2**64 - 1


def splitmix64(state):
    """One number of the published generator, in Python's integers: returns (state, output)."""
    state = (state + 0x9E3779B97F4A7C15) & MASK
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return state, z ^ (z >> 31)


def test_mix_is_splitmix64():
    """Counters give the published stream, wrapping and shifting as unsigned 64-bit arithmetic does."""
    for seed in (0, 1, 1234567, 2**63, 2**64 - 1):
        signed = seed - (1 << 64) if seed >> 63 else seed
        ours = mix(torch.tensor(signed) + torch.arange(1, 6) * GOLDEN)
        state, expected = seed, []
        for _ in range(5):
            state, output = splitmix64(state)
            expected.append(output)
        assert [value & MASK for value in ours.tolist()] == expected


def test_keys_don_t_collide():
    """F5: 1e5 pairs of close seeds and positions have 1e5 keys, and as many in every stream."""
    seeds = torch.arange(-50, 50).repeat_interleave(1000)
    positions = torch.arange(1000).repeat(100)
    keys = row_keys(seeds, positions)
    everything = torch.cat((keys, substream(keys, 1), substream(keys, 2)))
    assert len(everything.unique()) == len(everything) == 300_000


def test_noise_is_finite_at_both_ends(monkeypatch):
    """The extreme random words give finite noise, and the largest is far out: rare tokens can be drawn."""
    module = gumbel.__globals__
    for bits, low, high in ((0, 43.0, 45.0), (-1, -4.0, -3.0)):
        monkeypatch.setitem(module, "mix", lambda x, bits=bits: torch.full_like(x, bits))
        noise = gumbel(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64))
        assert low < noise.item() < high


def test_distribution():
    """A million numbers follow the Gumbel distribution (Kolmogorov-Smirnov, p > 0.001), their tail too."""
    noise = gumbel(row_keys(torch.arange(1000), torch.zeros(1000).long()), torch.arange(1000)[None]).flatten()
    ordered, count = noise.sort().values, noise.numel()
    exact = torch.exp(-torch.exp(-ordered))
    rank = torch.arange(1, count + 1, dtype=torch.float64) / count
    assert float((exact - rank).abs().max()) < 1.95 / math.sqrt(count)
    expected = count * -math.expm1(-math.exp(-9.0))
    assert abs(int((noise > 9.0).sum()) - expected) < 4 * math.sqrt(expected)


def test_streams_are_independent():
    """Noise of neighbouring seeds, positions and items is uncorrelated."""
    keys = row_keys(torch.arange(3000), torch.full((3000,), 7))
    base = gumbel(keys, torch.arange(2)[None])
    others = [
        gumbel(row_keys(torch.arange(3000) + 1, torch.full((3000,), 7)), torch.arange(1)[None])[:, 0],
        gumbel(row_keys(torch.arange(3000), torch.full((3000,), 8)), torch.arange(1)[None])[:, 0],
        gumbel(substream(keys, 1), torch.arange(1)[None])[:, 0],
        base[:, 1],
    ]
    for other in others:
        assert abs(float(torch.corrcoef(torch.stack((base[:, 0], other)))[0, 1])) < 4 / math.sqrt(3000)
