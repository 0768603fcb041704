"""Gumbel noise from counters: a pure function of 64-bit keys, the same on every device and in every batch.

`mix` is the finaliser of splitmix64 (Steele, Lea and Flood 2014) in wrapping int64 arithmetic. The n-th
number of a stream is mix(key + n * GOLDEN), as splitmix64 counts.
"""

from torch import Tensor

GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as int64
_FIRST = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_SECOND = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


def mix(x: Tensor) -> Tensor:
    """Scatter int64 numbers, one to one."""
    x = (x ^ _shift_right(x, 30)) * _FIRST
    x = (x ^ _shift_right(x, 27)) * _SECOND
    return x ^ _shift_right(x, 31)


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """[B] int64: one key per (seed, position), both [B] int64."""
    return mix(mix(seeds + GOLDEN) + positions * GOLDEN)


def substream(keys: Tensor, number: int) -> Tensor:
    """[B] int64: keys of another stream of draws."""
    return mix(mix(keys) + number)


def gumbel(keys: Tensor, items: Tensor) -> Tensor:
    """Standard Gumbel noise, -log(-log(1 - u)), for counters ``items`` [B or 1, N] int64 of ``keys`` [B].

    Returns:
        [B, N] float64. u is uniform on (0, 1) with 63 random bits and relative precision near 0, where the
        largest values come from, so that they reach 43 and every one is finite.
    """
    bits = mix(keys.unsqueeze(1) + (items + 1) * GOLDEN)
    u = _shift_right(bits, 1).double().mul_(2.0**-63).clamp_(2.0**-64, 1 - 2.0**-53)
    return u.neg_().log1p_().neg_().log_().neg_()


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """The logical shift: torch's own fills with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
