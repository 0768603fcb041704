"""Gumbel noise from counters in Triton: `tokenspeed_rl_kernels.gumbel`, in unsigned arithmetic."""

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND = tl.constexpr(0x94D049BB133111EB)
LARGEST = tl.constexpr(2**63 - 1024)
"""Larger words of 63 bits are 2^63 in float64, or this one."""


@triton.jit
def mix(x):
    """Scatter uint64 numbers, one to one."""
    x = (x ^ (x >> 30)) * FIRST
    x = (x ^ (x >> 27)) * SECOND
    return x ^ (x >> 31)


@triton.jit
def row_key(seed, position):
    """uint64: the key of an int64 seed and position."""
    seed = seed.to(tl.uint64, bitcast=True)
    return mix(mix(seed + GOLDEN) + position.to(tl.uint64, bitcast=True) * GOLDEN)


@triton.jit
def substream(key, number):
    """uint64: the key of another stream of draws."""
    return mix(mix(key) + number)


@triton.jit
def gumbel(key, items):
    """float64: standard Gumbel noise for counters `items` >= 0 of a key."""
    return gumbel_of(mix(key + (items + 1).to(tl.uint64) * GOLDEN))


@triton.jit
def gumbel_of(bits):
    """float64: -log(-log1p(-u)), u the first 63 bits of a random uint64."""
    u = tl.maximum(tl.minimum(bits >> 1, LARGEST).to(tl.float64) * 2.0**-63, 2.0**-64)
    rest = 1.0 - u
    # log1p by Kahan's trick: log(rest) is off by as much as rest was rounded, and so is the divisor.
    rounded = tl.where(rest == 1.0, -1.0, rest - 1.0)
    log1p = tl.where(rest == 1.0, -u, tl.log(rest) * (-u / rounded))
    return -tl.log(-log1p)
