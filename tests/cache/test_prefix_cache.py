"""The prefix cache against a list of what was written where."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tokenspeed_rl.cache.page_pool import PagePool
from tokenspeed_rl.cache.prefix_cache import Node, PrefixCache

World = tuple[int, str | None]
"""Epoch of the weights, and adapter."""
Content = tuple[World, tuple[int, ...]]
"""With what, and of which tokens up to the end of the page: what its keys and values depend on."""
SIZE = 2
picks = st.integers(0, 20)
adapters = st.sampled_from([None, None, "a", "b"])
counts = st.integers(0, 4)


class Holder:
    """A request as the cache sees it: pages it owns, the first `kept` of them known to the cache."""

    def __init__(self, tokens: Sequence[int], pages: list[int], kept: int, node: Node, world: World) -> None:
        self.tokens = tokens
        self.pages = pages
        self.kept = kept
        self.node = node
        self.world = world


class CacheAgainstDict(RuleBasedStateMachine):
    """Requests come, compute pages, share them and go, as the scheduler has them do, beside a dict.

    `findable` has what a match must find: the page of each content. Of what the cache may evict, the model
    only knows that it is idle; which goes first has tests of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(9)
        self.cache = PrefixCache(self.pool, SIZE)
        self.holders: list[Holder] = []
        self.written: dict[int, Content] = {}
        self.findable: dict[Content, int] = {}
        self.epoch = 0

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        spare=st.integers(0, 3),
        count=counts,
        adapter=adapters,
    )
    def arrive(self, tokens: list[int], spare: int, count: int, adapter: str | None) -> None:
        limit = max(0, len(tokens) - spare)
        free, idle = set(range(self.pool.num_pages)) - self._used(), self._kept() - self._held()
        pages, node = self.cache.match(tokens, limit, adapter)
        self._check_match(adapter, tokens, limit, pages)
        idle -= set(pages)
        needed = -(-len(tokens) // SIZE) - len(pages)
        fresh = self.cache.allocate(needed)
        assert (fresh is None) == (needed > len(free) + len(idle))
        if fresh is None:
            self.cache.release(pages)
            return
        assert set(fresh) <= free | idle and len(set(fresh)) == needed
        self._evicted(set(fresh) & idle, spared=idle - set(fresh))
        self.holders.append(Holder(tokens, pages + fresh, len(pages), node, (self.epoch, adapter)))
        self.compute(-1, count)

    def _check_match(self, adapter: str | None, tokens: Sequence[int], limit: int, pages: list[int]) -> None:
        expected, world = [], (self.epoch, adapter)
        for end in range(SIZE, limit + 1, SIZE):
            page = self.findable.get((world, tuple(tokens[:end])))
            if page is None:
                break
            expected.append(page)
        assert pages == expected
        for number, page in enumerate(pages):
            assert self.written[page] == (world, tuple(tokens[: (number + 1) * SIZE]))

    def _evicted(self, pages: set[int], spared: set[int]) -> None:
        for content in [c for c, page in self.findable.items() if page in pages]:
            del self.findable[content]
        for world, tokens in self.findable:  # no prefix lost its beginning
            if len(tokens) > SIZE:
                assert (world, tokens[:-SIZE]) in self.findable
        if pages:
            assert self.pool.num_free == 0, "an idle page went although one was free"
        assert spared <= self._used()

    @precondition(lambda self: self.holders)
    @rule(pick=picks, count=counts)
    def compute(self, pick: int, count: int) -> None:
        """Fill the next pages of a request, and insert each."""
        holder = self.holders[pick % len(self.holders)]
        for _ in range(min(count, len(holder.tokens) // SIZE - holder.kept)):
            self._compute_page(holder)

    def _compute_page(self, holder: Holder) -> None:
        number = holder.kept
        own, content = holder.pages[number], (holder.world, tuple(holder.tokens[: (number + 1) * SIZE]))
        assert self.pool.holders(own) == 1, "a page that is still being written has one owner"
        self.written[own] = content
        # What stands before may have been forgotten, or be of an older epoch: then this isn't found either.
        beginning = self._findable_pages(holder.world, content[1], number)
        reachable = holder.world[0] == self.epoch and holder.pages[:number] == beginning
        before = self.findable.get(content) if reachable else None
        holder.node, page = self.cache.insert(holder.node, content[1][-SIZE:], own)
        assert self.written[page] == content
        if before is not None:
            assert page == before and self.pool.holders(own) == 0
        elif reachable:
            assert page == own
            self.findable[content] = own
        holder.pages[number] = page
        holder.kept += 1

    def _findable_pages(self, world: World, tokens: Sequence[int], count: int) -> list[int | None]:
        ends = range(SIZE, count * SIZE + 1, SIZE)
        return [self.findable.get((world, tuple(tokens[:end]))) for end in ends]

    @precondition(lambda self: self.holders)
    @rule(pick=picks)
    def fork(self, pick: int) -> None:
        """A second sample takes over what a first has computed."""
        first = self.holders[pick % len(self.holders)]
        pages = first.pages[: first.kept]
        for page in pages:
            self.pool.share(page)
        tokens = first.tokens[: first.kept * SIZE]
        self.holders.append(Holder(tokens, pages, first.kept, first.node, first.world))

    @precondition(lambda self: self.holders)
    @rule(pick=picks, count=counts)
    def leave(self, pick: int, count: int) -> None:
        for _ in range(min(count, len(self.holders))):
            self.cache.release(self.holders.pop(pick % len(self.holders)).pages)

    @rule(tokens=st.lists(st.integers(0, 1), max_size=9), adapter=adapters)
    def look(self, tokens: list[int], adapter: str | None) -> None:
        pages, _ = self.cache.match(tokens, len(tokens), adapter)
        self._check_match(adapter, tokens, len(tokens), pages)
        self.cache.release(pages)

    @precondition(lambda self: self.holders)
    @rule(kind=st.sampled_from(["forget"] * 4 + ["new_epoch", "flush"]), pick=picks)
    def lose(self, kind: str, pick: int) -> None:
        if kind == "forget":
            self._forget(self.holders[pick % len(self.holders)])
        elif kind == "new_epoch":
            self.cache.new_epoch()
        elif kind == "flush":
            self.cache.flush()
            assert self.cache.num_cached == self.cache.num_idle == 0
            assert self._used() == self._held()
        if kind != "forget":
            self.findable.clear()
            self.epoch += 1

    def _forget(self, holder: Holder) -> None:
        """What a request with broken numbers wrote is not found again, nor what continues it."""
        self.cache.forget(holder.pages)
        gone = {c for c, page in self.findable.items() if page in holder.pages}
        for world, tokens in list(self.findable):
            if any(world == w and tokens[: len(t)] == t for w, t in gone):
                del self.findable[world, tokens]

    def _used(self) -> set[int]:
        return {page for page in range(self.pool.num_pages) if self.pool.holders(page)}

    def _held(self) -> set[int]:
        return {page for holder in self.holders for page in holder.pages}

    def _kept(self) -> set[int]:
        """Pages that the cache itself owns: one owner more than there are requests holding them."""
        owners = {page: 0 for page in range(self.pool.num_pages)}
        for holder in self.holders:
            for page in holder.pages:
                owners[page] += 1
        extra = {page: self.pool.holders(page) - count for page, count in owners.items()}
        assert set(extra.values()) <= {0, 1}, "a page was lost, or is owned by nobody known"
        return {page for page, more in extra.items() if more}

    @invariant()
    def pages_are_accounted_for(self) -> None:
        kept, held = self._kept(), self._held()
        assert self.pool.num_free + self.pool.num_used == self.pool.num_pages
        assert self.pool.num_used == len(kept | held)
        assert self.cache.num_cached == len(kept)
        assert self.cache.num_idle == len(kept - held)
        assert self.cache.num_available == self.pool.num_free + len(kept - held)
        assert set(self.findable.values()) <= kept

    def teardown(self) -> None:
        for holder in self.holders:
            self.cache.release(holder.pages)
        assert self.cache.allocate(self.pool.num_pages) is not None, "a page leaked"


CacheAgainstDict.TestCase.settings = settings(max_examples=300, stateful_step_count=40)
test_cache_against_a_dict = CacheAgainstDict.TestCase
"""D1, D2: matches are exactly right, in one epoch, with one adapter; pages are never lost, owned twice or
evicted in use."""


def filled(cache: PrefixCache, *prompts: list[int]) -> list[list[int]]:
    """Compute and keep each prompt (whole pages) in turn, and let go of it; returns its pages."""
    tables = []
    for tokens in prompts:
        pages, node = cache.match(tokens, len(tokens))
        for start in range(len(pages) * SIZE, len(tokens), SIZE):
            fresh = cache.allocate(1)
            assert fresh is not None
            node, page = cache.insert(node, tuple(tokens[start : start + SIZE]), fresh[0])
            pages.append(page)
        cache.release(pages)
        tables.append(pages)
    return tables


def found(cache: PrefixCache, tokens: list[int]) -> int:
    """How many tokens a match finds."""
    pages, _ = cache.match(tokens, len(tokens))
    cache.release(pages)
    return len(pages) * SIZE


def test_least_recently_used_prefix_goes_first() -> None:
    """A prompt that was just asked for again outlives one that wasn't, whatever came first."""
    cache = PrefixCache(PagePool(6), SIZE)
    a, b, c = [1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]
    filled(cache, a, b, c)
    assert found(cache, a) == 4
    assert cache.allocate(2) is not None
    assert [found(cache, tokens) for tokens in (a, b, c)] == [4, 0, 4]


def test_the_end_of_a_prefix_goes_before_its_beginning() -> None:
    """What many prompts share is worth more than what one of them ends in."""
    cache = PrefixCache(PagePool(4), SIZE)
    filled(cache, [1, 1, 2, 2, 3, 3, 4, 4])
    lengths = []
    for _ in range(4):
        assert cache.allocate(1) is not None
        lengths.append(found(cache, [1, 1, 2, 2, 3, 3, 4, 4]))
    assert lengths == [6, 4, 2, 0]


def test_a_shared_beginning_outlives_all_its_ends() -> None:
    """Neither the order of arrivals nor of departures makes a beginning go before what continues it."""
    cache = PrefixCache(PagePool(4), SIZE)
    ends = [[1, 1, 2, 2], [1, 1, 3, 3], [1, 1, 4, 4]]
    filled(cache, *ends)
    pages, _ = cache.match(ends[0], SIZE)  # the beginning alone is used, and let go of, last
    cache.release(pages)
    for left in (2, 1, 0):
        assert cache.allocate(1) is not None
        assert sum(found(cache, tokens) == 4 for tokens in ends) == left
        assert found(cache, [1, 1]) == 2


def test_pages_in_use_are_never_evicted() -> None:
    """A cache full of pages that requests hold gives nothing away, and changes nothing when asked."""
    cache = PrefixCache(PagePool(3), SIZE)
    filled(cache, [1, 1, 2, 2])
    pages, _ = cache.match([1, 1], 2)
    assert cache.num_available == 2
    assert cache.allocate(3) is None
    assert (cache.num_available, cache.num_idle, found(cache, [1, 1, 2, 2])) == (2, 1, 4)
    assert not set(pages) & set(cache.allocate(2) or [])


def test_a_second_page_of_the_same_content_is_given_up() -> None:
    """Two requests that computed the same page at once end up with one, and the other is free again."""
    cache = PrefixCache(PagePool(4), SIZE)
    first, second = cache.allocate(1) or [], cache.allocate(1) or []
    assert cache.insert(cache.root(), (1, 1), first[0])[1] == first[0]
    node, page = cache.insert(cache.root(), (1, 1), second[0])
    assert (page, cache.pool.holders(page), cache.pool.holders(second[0])) == (first[0], 3, 0)
    assert cache.insert(cache.root(), (1, 1), page) == (node, page), "inserting it again changes nothing"
    assert cache.pool.holders(page) == 3


def test_equal_pages_behind_different_beginnings_are_different() -> None:
    """Keys and values depend on all that stands before: the same tokens elsewhere are no match."""
    cache = PrefixCache(PagePool(4), SIZE)
    filled(cache, [1, 1, 7, 7], [2, 2])
    assert found(cache, [2, 2, 7, 7]) == 2
    assert found(cache, [7, 7]) == 0


def test_forgetting_takes_all_that_follows() -> None:
    """F7: what continues a forgotten page is not found either, and idle pages are free at once."""
    cache = PrefixCache(PagePool(5), SIZE)
    table = filled(cache, [1, 1, 2, 2, 3, 3], [1, 1, 4, 4])[0]
    cache.forget([table[1]])
    assert found(cache, [1, 1, 2, 2, 3, 3]) == 2 and found(cache, [1, 1, 4, 4]) == 4
    assert cache.pool.num_free == 3
    cache.forget([table[0], table[0]])
    assert cache.pool.num_free == 5


def test_adapters_share_nothing() -> None:
    """H13: keys and values depend on the adapter: each finds its own, and forgetting leaves the others."""
    cache = PrefixCache(PagePool(4), SIZE)
    for adapter in ("a", "b"):
        pages, node = cache.match([1, 1], 2, adapter)
        assert pages == [] and node is cache.root(adapter)
        pages = cache.allocate(1) or []
        cache.insert(node, (1, 1), pages[0])
        cache.release(pages)
    assert found(cache, [1, 1]) == 0 and cache.num_cached == 2
    [a], [b] = (cache.match([1, 1], 2, adapter)[0] for adapter in ("a", "b"))
    assert a != b
    cache.release([a, b])
    cache.forget([a])
    assert cache.match([1, 1], 2, "a")[0] == [] and cache.match([1, 1], 2, "b")[0] == [b]


@pytest.mark.parametrize("change", ["new_epoch", "flush"])
def test_a_new_epoch_finds_nothing_old_and_loses_no_page(change: str) -> None:
    """D1, D2: not even what an older request goes on computing is found; its pages come back all the same."""
    cache = PrefixCache(PagePool(4), SIZE)
    filled(cache, [1, 1, 2, 2])
    pages, node = cache.match([1, 1], 2)
    old_root = cache.root()
    getattr(cache, change)()
    assert found(cache, [1, 1, 2, 2]) == 0
    for parent, key in ((node, (3, 3)), (old_root, (5, 5))):
        fresh = cache.allocate(1) or []
        pages.append(cache.insert(parent, key, fresh[0])[1])
    assert found(cache, [1, 1, 3, 3]) == found(cache, [5, 5]) == 0
    cache.release(pages)
    assert len(cache.allocate(4) or []) == 4


def test_switched_off_it_only_counts() -> None:
    """`enable_prefix_caching=False`: nothing is kept, nothing found, pages are free when let go of."""
    cache = PrefixCache(PagePool(2), SIZE, enabled=False)
    table = filled(cache, [1, 1, 2, 2])[0]
    assert table == [0, 1]
    assert (found(cache, [1, 1, 2, 2]), cache.num_cached, cache.pool.num_free) == (0, 0, 2)


def test_switched_on_again_it_knows_what_came_before() -> None:
    """`enable_prefix_caching` may change under a request: pages that follow what wasn't kept are found by
    nobody, and two of the same tokens behind different ones are never taken for one."""
    cache = PrefixCache(PagePool(8), SIZE)
    filled(cache, [1, 1, 2, 2])
    cache.enable(False)
    assert cache.num_cached == 0
    owned = []
    for begin in ((3, 3), (4, 4)):
        (first, second) = cache.allocate(2) or []
        node, first = cache.insert(cache.root, begin, first)
        owned.append((node, [first, second]))
    cache.enable(True)
    for node, pages in owned:
        assert cache.insert(node, (5, 5), pages[1])[1] == pages[1]
    assert [found(cache, ids) for ids in ([1, 1], [3, 3], [4, 4], [5, 5])] == [0, 0, 0, 0]
    for _, pages in owned:
        cache.release(pages)
    assert cache.num_available == 8 and len(cache.allocate(8) or []) == 8
