"""Reference-counted pages of the KV cache, as numbers: which are free, and how many owners each used one
has."""

from collections.abc import Iterable


class PagePool:
    """`num_pages` page ids, each free or held by one or more owners.

    `num_free + num_used == num_pages` holds after every call. Low ids are handed out first, so that a lightly
    used cache touches little memory. Not thread-safe: the loop's thread owns it.
    """

    def __init__(self, num_pages: int = 0) -> None:
        self.resize(num_pages)

    def resize(self, num_pages: int) -> None:
        """Start over with `num_pages` free pages. Nobody may hold any."""
        assert not any(getattr(self, "_holders", ())), "a held page would be lost"
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def holders(self, page: int) -> int:
        """How many owners `page` has; 0 means free."""
        return self._holders[page]

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one owner each, or None (and nothing taken) when fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, page: int) -> None:
        """One more owner for a used page."""
        assert self._holders[page] > 0, f"page {page} is free"
        self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One owner fewer for each page; those left without any are free again."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)
