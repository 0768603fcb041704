"""Keys of random draws."""

import random
from itertools import product
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_rl.core.seeds import MASK, draw_seed, mix, seed_of, unmix

seeds = st.integers(0, 2**64 - 1)
pairs = st.tuples(seeds, seeds)


def test_no_two_samples_share_a_key() -> None:
    """F5: no collision in 2 * 10^5 keys over (seed, child) and (engine seed, request, child), small numbers
    and neighbours included; every key fits a signed 64-bit integer."""
    starts = [0, 2**16, 2**31, 2**32, 2**62]
    explicit = [
        draw_seed(start + seed, child, engine_seed=0, number=0)
        for start, seed, child in product(starts, range(200), range(100))
    ]
    running = [
        draw_seed(None, child, engine_seed=engine, number=number)
        for engine, number, child in product([0, 1, 2, 0x5EED, 2**63 - 1], range(1000), range(20))
    ]
    assert len({*explicit, *running}) == len(explicit) + len(running) == 200_000
    assert min(*explicit, *running) >= -(2**63) and max(*explicit, *running) < 2**63


@given(seed=seeds, child=st.integers(0, 999), engines=pairs, numbers=pairs)
def test_a_seed_of_its_own_is_all_that_counts(
    seed: int, child: int, engines: tuple[int, int], numbers: tuple[int, int]
) -> None:
    """F4, F5: with an explicit seed neither the engine's nor the number of the request (and so no batch mate,
    order or rank) changes a draw; without one, both do."""

    def keys(seed: int | None) -> set[int]:
        return {draw_seed(seed, child, engine_seed=e, number=n) for e in engines for n in numbers}

    assert len(keys(seed)) == 1
    assert len(keys(None)) == len(set(engines)) * len(set(numbers))
    assert not keys(seed) & keys(None)


def test_keys_are_the_same_on_every_machine() -> None:
    """F5: a resubmitted sample continues identically elsewhere: these numbers are part of the promise."""
    assert mix(0) == 0xE220A8397B1DCDAF, "the first output of splitmix64 with seed 0"
    assert draw_seed(7, 0, engine_seed=0, number=0) == -8174053981357693207
    assert draw_seed(None, 3, engine_seed=7, number=11) == -8956264702385028220


@given(seeds, st.integers(0, 999), seeds)
def test_any_sample_can_be_drawn_again_as_a_request_of_its_own(seed: int, child: int, number: int) -> None:
    """A dump says with which seed a request of one sample draws what some sample drew, with or without a seed
    of its own."""
    assert unmix(mix(seed)) == mix(unmix(seed)) == seed
    for asked in (seed, None):
        key = draw_seed(asked, child, engine_seed=7, number=number)
        again = seed_of(key)
        assert 0 <= again <= MASK and draw_seed(again, 0, engine_seed=1, number=2) == key
    assert seed_of(draw_seed(seed, 0, engine_seed=7, number=number)) == seed


def test_keys_are_spread_over_all_bits() -> None:
    """Seeds 0, 1, 2, ... give keys of which each bit is set about half the time."""
    keys = [draw_seed(seed, 0, engine_seed=0, number=0) for seed in range(4096)]
    for bit in range(64):
        assert 0.45 < sum(key >> bit & 1 for key in keys) / len(keys) < 0.55


def test_no_generator_is_touched() -> None:
    """F14: keys come out of arithmetic; the process's generators stay where they were."""

    def states() -> list[Any]:
        return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]

    before = states()
    draw_seed(1, 2, engine_seed=3, number=4)
    draw_seed(None, 2, engine_seed=3, number=4)
    assert states() == before
