"""Tensors over memory that something else owns: several storages, side by side, in one block."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor


class _CudaBytes:
    """Exports device memory through the CUDA array interface, and keeps its owner alive."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


@torch.inference_mode(False)
def tensor_at(
    address: int, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device, owner: object
) -> Tensor:
    """A contiguous tensor at `address` with a storage of its own, exactly as long as the tensor.

    Whoever looks at storages (safetensors, accelerate, `state_dict` users) sees an independent tensor, though
    its neighbours in memory may belong together. The tensor keeps `owner`, and so the memory, alive. It is no
    inference tensor, whatever mode the caller is in.
    """
    nbytes = prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    if device.type == "cpu":
        block = (ctypes.c_uint8 * nbytes).from_address(address)
        block.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(block, dtype=dtype).view(tuple(shape))
    raw = torch.as_tensor(_CudaBytes(address, nbytes, owner), device=device)
    return raw.view(dtype).view(tuple(shape))


def owns_its_storage(tensor: Tensor) -> bool:
    """Whether the tensor is the whole of its storage, so that it may move without leaving anybody behind."""
    storage = tensor.untyped_storage()
    whole = tensor.is_contiguous() and tensor.storage_offset() == 0 and storage.nbytes() == tensor.nbytes
    return whole and not (tensor.device.type == "cpu" and tensor.is_shared())


def are_adjacent(tensors: Sequence[Tensor]) -> bool:
    """Whether contiguous tensors follow each other in memory without a gap, in this order."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        return False
    return all(left.data_ptr() + left.nbytes == right.data_ptr() for left, right in pairwise(tensors))


def fuse(tensors: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """One tensor of `shape` over adjacent tensors (`are_adjacent`), which it keeps alive; no copy."""
    first = tensors[0]
    return tensor_at(first.data_ptr(), shape, dtype=first.dtype, device=first.device, owner=tuple(tensors))
