"""The tensors behind the pages."""

import pytest
import torch

from tokenspeed_rl.cache.kv_cache import KVCache, KVLayout
from tokenspeed_rl.memory import HostMemory


def small(dtype: torch.dtype = torch.float32) -> KVCache:
    layout = KVLayout(num_layers=2, num_kv_heads=3, page_size=4, head_dim=5, dtype=dtype)
    memory = HostMemory()
    return KVCache(layout, 9, lambda nbytes, stripes: memory.reserve("kv_cache", nbytes, stripes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_what_is_mapped(dtype: torch.dtype) -> None:
    """A7: the size of a page, known before anything is mapped, times the pages is what tensors take."""
    kv = small(dtype)
    assert kv.nbytes == 0 and kv.layout.page_bytes == 2 * 2 * 3 * 4 * 5 * dtype.itemsize
    kv.map(7)
    assert kv.nbytes == 7 * kv.layout.page_bytes == sum(t.nbytes for t in (*kv.k, *kv.v))
    assert kv.num_pages == 7
    kv.unmap()
    assert (kv.nbytes, kv.num_pages, kv.k, kv.v) == (0, 0, (), ())


def test_every_layer_has_memory_of_its_own() -> None:
    """Each layer's [pages, heads, page, dim] is its own memory: a write shows there and nowhere else."""
    kv = small()
    kv.map(6)
    assert all(t.zero_().shape == (6, 3, 4, 5) for t in (*kv.k, *kv.v))
    kv.v[1][2] = 1.0
    assert kv.v[1][2].all()
    assert [int(t.count_nonzero()) for t in (*kv.k, *kv.v)] == [0, 0, 0, 60]


def test_addresses_are_the_same_however_many_pages() -> None:
    """A11: a captured graph's pointers stay right across release and wake with another number of pages."""
    kv = small()
    kv.map(2)
    before = [t.data_ptr() for t in (*kv.k, *kv.v)]
    kv.unmap()
    kv.map(9)
    assert [t.data_ptr() for t in (*kv.k, *kv.v)] == before
    assert all(t.is_contiguous() for t in (*kv.k, *kv.v))


def test_copies_are_whole_pages_in_all_layers() -> None:
    """F4: a sample's copy of the prompt's unfinished page is exact, and its own from then on."""
    kv = small()
    kv.map(5)
    for tensor in (*kv.k, *kv.v):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    before = [t.clone() for t in (*kv.k, *kv.v)]
    kv.copy_pages([(0, 3), (0, 4)])
    for now, then in zip((*kv.k, *kv.v), before, strict=True):
        assert torch.equal(now, then[[0, 1, 2, 0, 0]])
    kv.k[0][3] = 0.0
    assert torch.equal(kv.k[0][0], before[0][0])
    kv.copy_pages([])
