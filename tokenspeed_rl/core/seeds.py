"""Keys of random draws, as plain integers: no generator is kept and none of the process's is touched."""

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
EXPLICIT, RUNNING = 0x5EED, 0xE16E
"""Domains: a request's own seed never meets a running number."""


def mix(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit integers that scatters
    them."""
    x = (x + GOLDEN) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def unmix(x: int) -> int:
    """The inverse of `mix`."""
    x = _unshift(x, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) & MASK
    x = _unshift(x, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & MASK
    return (_unshift(x, 30) - GOLDEN) & MASK


def _unshift(x: int, bits: int) -> int:
    """y of x = y ^ (y >> bits)."""
    y = x
    for _ in range(64 // bits):
        y = x ^ (y >> bits)
    return y


def draw_seed(seed: int | None, index: int, *, engine_seed: int, number: int) -> int:
    """The signed 64-bit key of sample `index`: from the request's seed alone, or from (engine seed, running
    number)."""
    if seed is None:
        key = mix(mix(mix(RUNNING) ^ (engine_seed & MASK)) ^ number)
    else:
        key = mix(mix(EXPLICIT) ^ (seed & MASK))
    key = mix(key ^ index)
    return key - (1 << 64) if key >> 63 else key


def seed_of(key: int) -> int:
    """The request seed with which sample 0 has the key `key`, whatever sample of whatever request had it: the
    inverse of `draw_seed` at index 0."""
    return mix(EXPLICIT) ^ unmix(unmix(key & MASK))
