"""Pages as numbers: none lost, none owned twice by mistake."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tokenspeed_rl.cache.page_pool import PagePool


class PoolAgainstCounter(RuleBasedStateMachine):
    """The pool beside a multiset of shares: one entry for every owner of every page."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(7)
        self.shares: list[int] = []

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        free = self.pool.num_pages - len(set(self.shares))
        pages = self.pool.allocate(count)
        if count > free:
            assert pages is None
            return
        assert pages is not None and len(set(pages)) == count
        assert not set(pages) & set(self.shares), "a page in use was handed out again"
        assert all(0 <= page < self.pool.num_pages for page in pages)
        self.shares += pages

    @precondition(lambda self: self.shares)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.shares))
        self.pool.share(page)
        self.shares.append(page)

    @precondition(lambda self: self.shares)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.shares)))
        given_up = data.draw(st.permutations(self.shares))[:count]
        self.pool.release(given_up)
        self.shares = list((Counter(self.shares) - Counter(given_up)).elements())

    @precondition(lambda self: not self.shares)
    @rule(num_pages=st.integers(0, 9))
    def resize(self, num_pages: int) -> None:
        self.pool.resize(num_pages)
        assert self.pool.num_free == self.pool.num_pages == num_pages

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        assert self.pool.num_free + self.pool.num_used == self.pool.num_pages
        held = Counter(self.shares)
        assert [self.pool.holders(page) for page in range(self.pool.num_pages)] == [
            held[page] for page in range(self.pool.num_pages)
        ]
        assert self.pool.num_used == len(held)


PoolAgainstCounter.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
test_pool_against_a_multiset_of_shares = PoolAgainstCounter.TestCase
"""free + used = total after every operation, and owners are counted exactly."""


def test_low_pages_go_first() -> None:
    """A lightly used cache touches little memory: the lowest ids are handed out first, freed ones again."""
    pool = PagePool(5)
    assert pool.allocate(2) == [0, 1]
    pool.release([0])
    assert pool.allocate(2) == [0, 2]


def test_misuse_is_caught() -> None:
    """Releasing or sharing a free page, and dropping held ones, are faults of the engine itself."""
    pool = PagePool(2)
    for misuse in (lambda: pool.release([1]), lambda: pool.share(1)):
        with pytest.raises(AssertionError, match="free"):
            misuse()
    pool.allocate(1)
    with pytest.raises(AssertionError, match="lost"):
        pool.resize(4)
    with pytest.raises(AssertionError, match="free"):
        pool.release([0, 0])
