"""The tensors that the pages number."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every layer, by page.

    Mapped, `k[layer]` and `v[layer]` are [num_pages, num_kv_heads, page_size, head_dim] views of one
    allocation. A slot never written may hold anything, NaN too.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.num_pages = 0
        self.k: tuple[Tensor, ...] = ()
        self.v: tuple[Tensor, ...] = ()
        self._layers = num_layers
        self._page_shape = (num_kv_heads, page_size, head_dim)
        self._data = torch.zeros(0, dtype=dtype, device=device)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page's keys and values in all layers."""
        return 2 * self._layers * math.prod(self._page_shape) * self._data.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes mapped."""
        return self._data.nbytes

    def map(self, num_pages: int) -> None:
        """Allocate `num_pages` pages; memory of pages never written is not touched on the CPU."""
        shape = (2, self._layers, num_pages, *self._page_shape)
        self._data = torch.empty(shape, dtype=self._data.dtype, device=self._data.device)
        self.k, self.v = tuple(self._data[0]), tuple(self._data[1])
        self.num_pages = num_pages

    def unmap(self) -> None:
        """Give the memory back; what the pages held is gone."""
        self.k, self.v, self.num_pages = (), (), 0
        self._data = self._data.new_zeros(0)

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, (source, destination) each, in all layers."""
        for source, destination in copies:
            self._data[:, :, destination].copy_(self._data[:, :, source])
