"""Experts one by one, as checkpoints have them: the form in which every naming of theirs is the same."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor

_PACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_MIXTRAL_EXPERT = re.compile(r"(.*\.mlp\.experts\.\d+\.)(w[123])\.weight")


def one_by_one(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The matrices of packed experts, under names as of Qwen's checkpoints; anything else as it is.

    Args:
        name: Hugging Face name, without wrappers' prefixes.
        tensor: of packed experts [E, rows, columns], gates before ups.
    """
    owner, _, last = name.rpartition(".")
    projections = _PACKED.get(last, ()) if owner.endswith(".experts") and tensor.ndim == 3 else ()
    if not projections or tensor.shape[1] % len(projections):
        yield _renamed(name), tensor
        return
    for number, expert in enumerate(tensor):
        for projection, piece in zip(projections, expert.chunk(len(projections)), strict=True):
            yield f"{owner}.{number}.{projection}.weight", piece


def _renamed(name: str) -> str:
    name = name.replace(".block_sparse_moe.", ".mlp.")
    found = _MIXTRAL_EXPERT.fullmatch(name)
    return name if found is None else f"{found[1]}{_MIXTRAL[found[2]]}.weight"
