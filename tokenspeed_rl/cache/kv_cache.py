"""The tensors that the pages number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_rl.region import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """What a page holds."""

    num_layers: int
    num_kv_heads: int
    page_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def page_shape(self) -> tuple[int, int, int]:
        """Shape of one page's keys, or values, in one layer."""
        return (self.num_kv_heads, self.page_size, self.head_dim)

    @property
    def stripe_bytes(self) -> int:
        """Bytes of that."""
        return math.prod(self.page_shape) * self.dtype.itemsize

    @property
    def stripes(self) -> int:
        """How many such a page has: keys and values of every layer."""
        return 2 * self.num_layers

    @property
    def page_bytes(self) -> int:
        """Bytes of one page's keys and values in all layers."""
        return self.stripes * self.stripe_bytes


class LooseKV(NamedTuple):
    """Keys and values of every layer as `KVCache` has them, in memory of no region."""

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]


class KVCache:
    """Keys and values of every layer, by page.

    Mapped, `k[layer]` and `v[layer]` are [num_pages, num_kv_heads, page_size, head_dim] views of one region,
    contiguous, at the same addresses for life however many pages are mapped: a stripe of the region holds
    the keys, or the values, of one layer. A slot never written may hold anything, NaN too.
    """

    def __init__(self, layout: KVLayout, max_pages: int, reserve: Callable[[int, int], Region]) -> None:
        """`reserve` gives a region of (bytes per stripe, stripes)."""
        self.layout = layout
        self.max_pages = max_pages
        self.num_pages = 0
        self.k: tuple[Tensor, ...] = ()
        self.v: tuple[Tensor, ...] = ()
        self.region = reserve(max_pages * layout.stripe_bytes, layout.stripes)
        self._data: Tensor | None = None

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.layout.page_size

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.num_pages * self.layout.page_bytes

    def map(self, num_pages: int) -> None:
        """Take memory for `num_pages` pages, at most `max_pages`.

        Raises:
            OutOfMemoryError: nothing is mapped then.
        """
        self.region.map(num_pages * self.layout.stripe_bytes)
        self._data = self._pages(num_pages)
        self.k, self.v = tuple(self._data[0]), tuple(self._data[1])
        self.num_pages = num_pages

    def reach(self) -> LooseKV:
        """Keys and values of all `max_pages`, whatever is mapped: for those who keep addresses from one
        mapping to the next. Pages that aren't mapped must not be touched."""
        keys, values = self._pages(self.max_pages)
        return LooseKV(tuple(keys), tuple(values))

    def unmap(self) -> None:
        """Give the memory back; what the pages held is gone."""
        self.region.unmap()
        self._drop_views()

    def close(self) -> None:
        """Give back memory and addresses for good."""
        self._drop_views()
        self.region.close()

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, (source, destination) each, in all layers."""
        for source, destination in copies:
            assert self._data is not None, "a page number outlived its memory"
            self._data[:, :, destination].copy_(self._data[:, :, source])

    def _pages(self, count: int) -> Tensor:
        """The first pages of every stripe: [2, num_layers, count, ...] of a page."""
        stripes = self.region.bytes[:, : count * self.layout.stripe_bytes].view(self.layout.dtype)
        pages = stripes.unflatten(1, (count, *self.layout.page_shape))
        layers: Tensor = pages.unflatten(0, (2, self.layout.num_layers))
        return layers

    def _drop_views(self) -> None:
        self.k, self.v, self.num_pages, self._data = (), (), 0, None
