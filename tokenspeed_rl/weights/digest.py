"""One number for a set of weights, the same on the engine's and on the trainer's side."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.weights.expert_names import one_by_one
from tokenspeed_rl.weights.mapping import canonical, is_embedding, is_head
from tokenspeed_rl.weights.plain import lacks_memory


def checksum(
    named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
) -> str:
    """Digest of names, shapes, dtypes and exact bytes; equal sets have equal digests in any order.

    Wrappers' prefixes don't count, experts may be packed or one by one, and an ``lm_head.weight`` equal to
    the embedding counts as tied to it: once.

    Args:
        named_tensors: Hugging Face names with tensors of any shape, strides and device. An iterable is read
            once, one tensor at a time; none is kept.
        dtype: floating tensors are cast to it first, as an engine of that dtype holds them. None: as they
            are.

    Returns:
        32 hexadecimal digits.

    Raises:
        RequestError: the memory of a tensor was freed.
    """
    pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    entries = {
        (piece, _digest(part, dtype))
        for name, tensor in pairs
        for piece, part in one_by_one(canonical(name), tensor)
    }
    embeddings = {digest for name, digest in entries if is_embedding(name)}
    counted = sorted(entry for entry in entries if not (is_head(entry[0]) and entry[1] in embeddings))
    whole = hashlib.blake2b(digest_size=16)
    for name, digest in counted:
        whole.update(f"{name}\0{digest}\n".encode())
    return whole.hexdigest()


def _digest(tensor: Tensor, dtype: torch.dtype | None) -> str:
    held = tensor.detach()
    if type(held) is Tensor and held.layout is torch.strided and lacks_memory(held):
        raise RequestError(
            "the memory of a tensor was freed or cut short",
            got=f"{held.dtype} {list(held.shape)}",
            fix="Gather it first.",
        )
    if dtype is not None and held.is_floating_point():
        held = held.to(dtype)
    header = f"{held.dtype} {list(held.shape)}"
    raw = held.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.blake2b(header.encode(), digest_size=16)
    digest.update(raw.data)
    return digest.hexdigest()
