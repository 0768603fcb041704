"""Derived seeds: reproducible, disjoint, and nobody's neighbour's."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_rl.rl.seeds import derive, prompt_seeds
from tokenspeed_rl.sampling_params import SamplingParams

PROMPTS = [(1, 2), (1, 3), (12,), (1, 2), (2, 1), (1, 2)]


def test_seeds_are_the_same_on_every_machine() -> None:
    """F5, H8: a resumed run derives the seeds of the first one: these numbers are part of the format."""
    assert derive(0, "prompt", 3, (1, 2), 0) == 5856815229362067404
    assert derive(0) == 6197007067532723406


def test_seeds_do_not_collide() -> None:
    """F5: (seed, step, prompt) give 100,000 different seeds, all of which SamplingParams takes."""
    seeds = {
        derive(seed, "prompt", step, key, 0) for seed, step, key in product(range(10), range(100), range(100))
    }
    assert len(seeds) == 100_000
    for seed in (min(seeds), max(seeds)):
        assert SamplingParams(seed=seed).validate().seed == seed


def test_parts_of_a_path_do_not_run_together() -> None:
    """Steps, prompts and purposes are told apart wherever one ends and the next begins."""
    paths = [(1, 23), (12, 3), (123,), ("1", 23), ((1, 23),), ("1,23",), (1, "23"), ((1,), 23), (), ("",)]
    assert len({derive(0, *path) for path in paths}) == len(paths)
    assert derive(0, 1) != derive(1, 0)


@given(order=st.permutations(range(len(PROMPTS))), cut=st.integers(0, len(PROMPTS)))
def test_a_prompt_keeps_its_seed_in_any_batch(order: list[int], cut: int) -> None:
    """F5: neither the batch's order nor its split over ranks changes what a distinct prompt draws."""
    seeds = dict(zip(PROMPTS, prompt_seeds(7, 2, PROMPTS), strict=True))
    shuffled = [PROMPTS[i] for i in order]
    for part in (shuffled[:cut], shuffled[cut:]):
        for prompt, seed in zip(part, prompt_seeds(7, 2, part), strict=True):
            assert PROMPTS.count(prompt) > 1 or seed == seeds[prompt]


def test_equal_prompts_of_a_step_differ() -> None:
    """F4: a prompt that is in a batch three times is sampled three times, not copied; steps differ too."""
    first, second = prompt_seeds(7, 2, PROMPTS), prompt_seeds(7, 3, PROMPTS)
    assert len({*first, *second}) == 2 * len(PROMPTS)
    assert prompt_seeds(7, 2, PROMPTS) == first
