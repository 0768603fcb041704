"""Where the parameters of a live module are, to see later whether they are there still."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tokenspeed_rl.errors import WeightsInvalidError
from tokenspeed_rl.weights.adapters import bare
from tokenspeed_rl.weights.mapping import canonical
from tokenspeed_rl.weights.structure import address_of


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a parameter is found, and where its values were when it was shared."""

    owner: nn.Module
    attribute: str
    hf_name: str
    address: int
    storage: torch.UntypedStorage
    nbytes: int
    """Of the storage."""
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Placement:
    """The modules of a tree, each in its place, and the memory of their parameters.

    A layer counts as in its place also where PEFT has put adapters beside it since, or taken them away.
    """

    def __init__(self, root: nn.Module, wanted: Callable[[str], bool], fix: str) -> None:
        """`wanted` picks modules and parameters by their canonical names; `fix` says what brings it back."""
        self._fix = fix
        self._links = [
            (name, parent, key, bare(child))
            for prefix, parent in root.named_modules()
            for key, child in parent._modules.items()
            if wanted(canonical(name := f"{prefix}.{key}".lstrip(".")))
        ]
        self._places = [
            _Place(
                owner,
                attribute,
                name,
                param.data_ptr(),
                param.untyped_storage(),
                param.untyped_storage().nbytes(),
                param.shape,
                param.stride(),
                param.dtype,
                param.device,
            )
            for prefix, owner in root.named_modules(remove_duplicate=False)
            for attribute, param in owner._parameters.items()
            if param is not None and wanted(name := canonical(f"{prefix}.{attribute}"))
        ]

    def check(self) -> None:
        """Raise unless everything is where it was. From any thread; well under a millisecond for a few
        hundred parameters.

        Raises:
            WeightsInvalidError: a parameter was re-allocated, freed, cast, moved or replaced, or a module
                was.
        """
        for name, parent, key, child in self._links:
            there = parent._modules.get(key)
            if there is not child and bare(there) is not child:
                raise self._broken(f"the module {name} was replaced or removed")
        for place in self._places:
            param = place.owner._parameters.get(place.attribute)
            if param is None or type(param) is not nn.Parameter:
                raise self._broken(f"{place.hf_name} is no plain parameter any more", param)
            if (
                param.data_ptr() != place.address
                or place.storage.nbytes() != place.nbytes
                or param.shape != place.shape
                or param.dtype is not place.dtype
                or param.device != place.device
                or param.stride() != place.stride
            ):
                raise self._broken(f"{place.hf_name} was {_describe(place)} when it was shared", param)

    def _broken(self, what: str, param: Tensor | None = None) -> WeightsInvalidError:
        now = {} if param is None else {"got": f"now {_describe(param)}"}
        return WeightsInvalidError(what, fix=self._fix, **now)


def _describe(held: _Place | Tensor) -> str:
    address = held.address if isinstance(held, _Place) else address_of(held)
    return f"{held.dtype} {list(held.shape)} on {held.device} at {address:#x}"
