"""Tensors with storages of their own, side by side in memory that something else owns."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch

from tokenspeed_rl.alias import are_adjacent, fuse, owns_its_storage, tensor_at

CPU = torch.device("cpu")


class Owner:
    """Something that can be watched dying, and that keeps a block of memory."""

    def __init__(self, nbytes: int) -> None:
        self.block = torch.zeros(nbytes, dtype=torch.uint8)


def two_halves(dtype: torch.dtype = torch.float32) -> tuple[Owner, torch.Tensor, torch.Tensor]:
    owner = Owner(24 * dtype.itemsize)
    address = owner.block.data_ptr()
    left = tensor_at(address, (2, 6), dtype=dtype, device=CPU, owner=owner)
    right = tensor_at(address + left.nbytes, (2, 6), dtype=dtype, device=CPU, owner=owner)
    return owner, left, right


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_neighbours_have_storages_of_their_own(dtype):
    """E13: libraries that look at storages see two independent tensors, each exactly its own length."""
    owner, left, right = two_halves(dtype)
    for tensor in (left, right):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.storage_offset() == 0
        assert owns_its_storage(tensor)
    left.fill_(1), right.fill_(2)
    assert are_adjacent([left, right]) and not are_adjacent([right, left])
    assert owner.block.view(dtype).tolist() == [1.0] * 12 + [2.0] * 12
    fused = fuse([left, right], (4, 6))
    fused[3].fill_(7)
    assert right[1].tolist() == [7.0] * 6


def test_memory_lives_exactly_as_long_as_its_last_tensor():
    """Contract 6: adopted memory outlives the engine, and goes when the last parameter does."""
    owner, left, right = two_halves()
    gone = weakref.ref(owner)
    fused = fuse([left, right], (4, 6))
    del owner, left, right
    gc.collect()
    assert gone() is not None and fused.sum().item() == 0
    view = fused[1:].t()
    del fused
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


def test_copies_leave_the_block():
    """E13: deepcopy and pickle make ordinary tensors with the same values."""
    _, left, _ = two_halves()
    left.copy_(torch.arange(12.0).view(2, 6))
    for other in (copy.deepcopy(left), pickle.loads(pickle.dumps(left)), left.clone()):
        assert torch.equal(other, left) and other.data_ptr() != left.data_ptr()


def test_nothing_warns_and_no_default_interferes():
    """In-process manners: a default device, dtype or grad mode of the caller's changes nothing here."""
    with warnings.catch_warnings(), torch.device("meta"), torch.no_grad():
        warnings.simplefilter("error")
        block = torch.zeros(64, dtype=torch.uint8, device="cpu")
        tensor = tensor_at(block.data_ptr(), (4, 4), dtype=torch.float32, device=CPU, owner=block)
        empty = tensor_at(block.data_ptr(), (0, 4), dtype=torch.float32, device=CPU, owner=block)
    assert tensor.device == CPU and tensor.data_ptr() == block.data_ptr()
    assert empty.shape == (0, 4) and empty.device == CPU


def test_what_may_move_and_what_may_not():
    """Contract 6: only a tensor that is the whole of its storage may be adopted."""
    whole = torch.zeros(4, 4)
    assert owns_its_storage(whole)
    assert (
        not owns_its_storage(whole[:2])
        and not owns_its_storage(whole[2:])
        and not owns_its_storage(whole.t())
    )
    assert not owns_its_storage(torch.zeros(4).share_memory_())
    assert not are_adjacent([whole[:2], whole[:2]]) and are_adjacent([whole[:1], whole[1:]])
    assert not are_adjacent([whole[:, :2], whole[:, 2:]])
    assert not are_adjacent([whole[:2, :2].t(), whole[2:, :2].t()])
    squares = torch.zeros(8, 4)
    assert not are_adjacent([squares[:4].t(), squares[4:].t()])
