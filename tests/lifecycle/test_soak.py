"""Everything at once: control calls of four threads, at random, while four others generate."""

import pytest

from tests.soak.run import soak

SHOWN = 40


def hold(seconds: float, seed: int, family: str) -> None:
    """Soak, and check that nothing went wrong and that something was checked."""
    journal = soak(seconds, seed, family, lambda line: None)
    assert not journal.faults, "\n".join([*journal.last(SHOWN), *journal.faults])
    assert journal.counts["samples"] > 0 and journal.counts["tokens"] > 0


@pytest.mark.parametrize("seed", [0, 1])
def test_a_few_seconds(seed: int) -> None:
    """A to E: no output that its version spans don't explain, no hang, nothing kept, whatever is called when;
    with a backup of the weights (seed 0) and without."""
    hold(4.0, seed, "llama")


def test_a_few_seconds_of_experts() -> None:
    """C11: the same with a mixture of experts, whose routes are checked like its logprobs."""
    hold(4.0, 0, "moe")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("seed", "family"), [(2, "llama"), (3, "qwen3"), (4, "moe")])
def test_two_minutes(seed: int, family: str) -> None:
    """As above, with time for what is rare, and memory as flat as it was."""
    hold(120.0, seed, family)
