"""Full pages kept by content, so that a prompt seen before is not computed again.

A page is found by the pages before it and its own tokens, compared exactly (no hashes that could collide),
under one root per weight epoch and adapter: KV computed under other weights is never found. Plain Python,
owned by the loop's thread.
"""

from collections.abc import Iterable, Sequence

from tokenspeed_rl.cache.page_pool import PagePool


class Node:
    """One cached page: its content key under `parent`, and the pages that continue it."""

    __slots__ = ("children", "key", "page", "parent")

    def __init__(self, parent: "Node | None", key: tuple[int, ...], page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.children: dict[tuple[int, ...], Node] = {}


class PrefixCache:
    """Hands out pages of `pool`, and keeps full ones findable after their owners let go.

    The cache is itself one owner of every page it keeps. A kept page nobody else holds is *idle*: it stays
    findable until `allocate` needs it (least recently used first, the end of a prefix before its beginning).
    """

    def __init__(self, pool: PagePool, page_size: int, *, enabled: bool = True) -> None:
        self.pool = pool
        self.page_size = page_size
        self.enabled = enabled
        self._roots: dict[str | None, Node] = {}
        self._nodes: dict[int, Node] = {}
        # Idle nodes by page, longest idle first. Whoever holds a page holds all before it, so a node never
        # goes idle before its children: the first entry is always the end of a prefix.
        self._idle: dict[int, Node] = {}

    def root(self, adapter: str | None = None) -> Node:
        """Before the first page of what is computed with `adapter`, now."""
        return self._roots.setdefault(adapter, Node(None, (), -1))

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out now: free ones and idle ones."""
        return self.pool.num_free + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Cached pages that no request holds."""
        return len(self._idle)

    @property
    def num_cached(self) -> int:
        """Pages the cache keeps, idle or in use."""
        return len(self._nodes)

    def match(self, tokens: Sequence[int], limit: int, adapter: str | None = None) -> tuple[list[int], Node]:
        """The longest cached run of full pages that begins `tokens`, at most `limit` tokens, as computed with
        `adapter` (None: the base model); the caller owns the pages.

        Returns the pages and the node of the last one (the root where nothing matches), from which `insert`
        goes on.
        """
        node, pages, size = self.root(adapter), [], self.page_size
        for start in range(0, limit - size + 1, size) if self.enabled else ():
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            self._hold(child)
            pages.append(child.page)
            node = child
        return pages, node

    def insert(self, node: Node, key: tuple[int, ...], page: int) -> tuple[Node, int]:
        """Keep `page` (full, owned by the caller) as what follows `node`.

        Where the cache already has a page of the same content, the caller's own is given up for that one.
        Returns the node and the page that the caller owns from now on. Not `enabled`, it keeps nothing, but
        the node says what came before, for pages that follow when it is again.
        """
        if not self.enabled:
            return Node(node, key, page), page
        child = node.children.get(key)
        if child is not None:
            if child.page != page:
                self._hold(child)
                self.release([page])
            return child, child.page
        child = Node(node, key, page)
        node.children[key] = child
        self._nodes[page] = child
        self.pool.share(page)
        return child, page

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, evicting idle ones as needed, or None (and nothing changed) where that isn't
        enough."""
        if count > self.num_available:
            return None
        while self.pool.num_free < count:
            self._remove(next(iter(self._idle.values())))
        return self.pool.allocate(count)

    def release(self, pages: Iterable[int]) -> None:
        """The caller gives up its share of `pages`; cached ones that nobody else holds become idle."""
        for page in reversed(list(pages)):
            self.pool.release((page,))
            node = self._nodes.get(page)
            if node is not None and self.pool.holders(page) == 1:
                self._idle[page] = node

    def forget(self, pages: Iterable[int]) -> None:
        """Make these pages, and all that continues them, unfindable; their owners keep them."""
        for page in pages:
            node = self._nodes.get(page)
            if node is not None:
                self._drop_tree(node)

    def new_epoch(self) -> None:
        """From here on nothing cached before is found; idle pages go as `allocate` needs them."""
        self._roots = {}

    def flush(self) -> None:
        """Forget everything: idle pages are free at once, pages in use when their owners release them."""
        self.forget(list(self._nodes))
        self.new_epoch()

    def enable(self, enabled: bool) -> None:
        """Keep and find pages from now on, or forget all and keep none."""
        if self.enabled and not enabled:
            self.flush()
        self.enabled = enabled

    def _hold(self, node: Node) -> None:
        self._idle.pop(node.page, None)
        self.pool.share(node.page)

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.key]
        del self._nodes[node.page]
        self._idle.pop(node.page, None)
        self.pool.release((node.page,))

    def _drop_tree(self, node: Node) -> None:
        order = [node]
        for member in order:
            order.extend(member.children.values())
        for member in reversed(order):
            self._remove(member)
