"""How large the KV cache is."""

from typing import NamedTuple

from tokenspeed_rl.config import EngineConfig
from tokenspeed_rl.errors import OutOfMemoryError


class KVSize(NamedTuple):
    """What the KV cache gets, and what a request may ask for."""

    pages: int
    tokens: int
    """Most tokens of prompt and `max_new_tokens` together."""


def most_pages(config: EngineConfig, *, bytes_per_page: int, context: int, total: int) -> int:
    """Pages that the KV cache may ever have, for which addresses are reserved: `max_total_tokens`, else what
    `max_running_requests` full contexts could use, within the `total` bytes of the device."""
    if config.max_total_tokens is not None:
        return -(-config.max_total_tokens // config.page_size)
    useful = config.max_running_requests * -(-context // config.page_size)
    return max(1, min(useful, total // bytes_per_page))


def kv_size(
    config: EngineConfig, *, bytes_per_page: int, stripes: int, unit: int, most: int, free: int
) -> KVSize:
    """`max_total_tokens`, else `mem_fraction` of the `free` bytes less `reserve_bytes`, at most `most` pages.

    A page has an equal part in each of `stripes`, of which whole `unit`s of bytes are mapped: those count.

    Raises:
        OutOfMemoryError: not even one page fits.
    """
    if config.max_total_tokens is not None:
        return KVSize(most, config.max_total_tokens)
    share = int((free - config.reserve_bytes) * config.mem_fraction)
    pages = share // stripes // unit * unit * stripes // bytes_per_page
    if pages < 1:
        raise OutOfMemoryError(
            f"no page of the KV cache fits into mem_fraction={config.mem_fraction} of the memory that "
            f"reserve_bytes={config.reserve_bytes} leaves",
            wanted=-(-bytes_per_page // (stripes * unit)) * stripes * unit,
            free=free,
        )
    return KVSize(min(most, pages), pages * config.page_size)
