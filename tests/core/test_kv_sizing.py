"""How large the KV cache gets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_rl.config import EngineConfig
from tokenspeed_rl.core.kv_sizing import KVSize, kv_size, most_pages
from tokenspeed_rl.errors import OutOfMemoryError


def size(
    free: int,
    context: int = 1000,
    per_page: int = 100,
    total: int = 10**12,
    stripes: int = 1,
    unit: int = 1,
    **settings: object,
) -> KVSize:
    config = EngineConfig(**settings)  # type: ignore[arg-type]
    most = most_pages(config, bytes_per_page=per_page, context=context, total=total)
    return kv_size(config, bytes_per_page=per_page, stripes=stripes, unit=unit, most=most, free=free)


def test_an_explicit_capacity_is_what_it_says() -> None:
    """`max_total_tokens` is neither clamped nor rounded down: so many tokens do fit, whatever is free."""
    assert size(0, max_total_tokens=160) == KVSize(10, 160)
    assert size(0, max_total_tokens=161) == KVSize(11, 161)
    assert size(0, context=16, max_running_requests=1, max_total_tokens=1600) == KVSize(100, 1600)


def test_a_share_of_free_memory_is_taken() -> None:
    """`mem_fraction` of what `reserve_bytes` leaves, in whole pages."""
    assert size(10_000, mem_fraction=0.5).pages == 50
    assert size(10_000, mem_fraction=0.5, reserve_bytes=4_050).pages == 29


@given(
    free=st.integers(0, 10**6),
    stripes=st.integers(1, 9),
    stripe_bytes=st.integers(1, 500),
    unit=st.sampled_from([1, 16, 4096]),
    running=st.integers(1, 50),
)
def test_what_is_mapped_stays_within_the_share(
    free: int, stripes: int, stripe_bytes: int, unit: int, running: int
) -> None:
    """A1: a device maps whole units in every stripe; rounded up to those, the pages are no more than the
    share they were given, and the largest number of which that is true."""
    settings = {"context": 16, "max_running_requests": running, "mem_fraction": 1.0}

    def mapped(pages: int) -> int:
        return -(-pages * stripe_bytes // unit) * unit * stripes

    try:
        pages = size(free, per_page=stripes * stripe_bytes, stripes=stripes, unit=unit, **settings).pages
    except OutOfMemoryError as error:
        assert free < mapped(1) == error.wanted
    else:
        assert mapped(pages) <= free and (pages == running or mapped(pages + 1) > free)


def test_no_more_is_mapped_than_could_be_used() -> None:
    """A machine with much memory gives a small model no more than all running requests' full contexts."""
    small = size(10**9, context=17, max_running_requests=3)
    assert small.pages == 3 * 2
    assert size(10**9, context=17, max_running_requests=3, total=450).pages == 4


@pytest.mark.parametrize("reserve", [0, 950, 2000])
def test_no_room_is_an_error(reserve: int) -> None:
    """A1: where not even a page fits, wanted and free bytes are named."""
    with pytest.raises(OutOfMemoryError) as error:
        size(1000, per_page=501, reserve_bytes=reserve)
    assert (error.value.wanted, error.value.free) == (501, 1000)


@given(
    free=st.integers(0, 10**6),
    context=st.integers(1, 200),
    running=st.integers(1, 5),
    page_size=st.sampled_from([1, 16, 32]),
    total=st.none() | st.integers(1, 5000),
)
def test_whatever_is_accepted_fits_the_pages(
    free: int, context: int, running: int, page_size: int, total: int | None
) -> None:
    """F11: a request within the capacity and the context finds pages enough for itself."""
    settings = {"max_running_requests": running, "page_size": page_size, "max_total_tokens": total}
    try:
        found = size(free, context=context, **settings)
    except OutOfMemoryError:
        assert free * 0.5 < 100 and total is None
        return
    assert min(found.tokens, context) <= found.pages * page_size
    if total is None:
        assert found.pages * 100 <= free * 0.5
