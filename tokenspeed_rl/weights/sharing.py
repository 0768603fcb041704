"""Weights that a trainer's live module and the engine hold together: one memory, no copy, no update."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from tokenspeed_rl.alias import are_adjacent, fuse, owns_its_storage, tensor_at
from tokenspeed_rl.errors import ConfigError, WeightsInvalidError
from tokenspeed_rl.weights.adapters import adapter_parameters, lora_layers, of_adapter, read_adapters
from tokenspeed_rl.weights.mapping import Slot, canonical
from tokenspeed_rl.weights.placement import Placement
from tokenspeed_rl.weights.receipt import Receipt
from tokenspeed_rl.weights.snapshot import ModuleSnapshot
from tokenspeed_rl.weights.store import WeightStore
from tokenspeed_rl.weights.structure import Faults, check_module, no_faults, peft_wrappers, unwrap


def share(
    module: nn.Module,
    store: WeightStore,
    classes: Collection[str],
    version: str | None = None,
    others: Faults = no_faults,
) -> SharedWeights:
    """Make `store` read the parameters of the live `module` from now on, without a copy.

    Parameters that the engine wants side by side (q, k, v; gate, up) and that own their whole storage are
    *adopted*: their values move, bit for bit, into one block of memory, each keeping a storage of its own
    there, and the parameter objects, their gradients and optimizer state stay what they are. The block
    belongs to the module: it lives as long as any of its parameters does, also without an engine. Views of a
    parameter taken before (a `state_dict`, say) keep the old memory. Parameters that lie side by side
    already, such as another engine's adopted ones, and views into a larger buffer are read where they are; so
    is everything that has a slot alone, and so are LoRA adapters.

    Everything is checked before the first parameter moves: a refused call leaves module and store as they
    were. (Should memory run out between two moves, the store is as it was and every value intact.)

    Args:
        module: a transformers causal LM, or one inside DistributedDataParallel, torch.compile or PEFT's LoRA.
        store: its slots, dtype and device are what the module must fit. The change is committed in its
            version: the first set keeps the label given at construction, unless `version` names another.
        classes: names of the transformers classes that the model family is made of
            (`structure.check_module`).
        version: label of the weights; None as `WeightVersion.commit` says.
        others: finds what else is wrong with the module, now and whenever it looks changed
            (`structure.check_module`).

    Raises:
        ConfigError: the module computes something else than the engine, or its parameters don't fit, by name.
    """
    root, wrappers = unwrap(module), peft_wrappers(module)
    check_module(root, classes, store, wrappers, others)
    began = time.perf_counter()
    with torch.inference_mode(False), torch.no_grad():
        params = {canonical(name): param for name, param in root.named_parameters(remove_duplicate=False)}
        uses = Counter(_storage(param) for param in params.values())
        store.settle()
        shared = {
            slot.name: _join([params[part.hf_name] for part in slot.parameters], slot, uses)
            for slot in store.slots
        }
        store.settle()
    store.borrow(shared, read_adapters(root, store.slots))
    if store.version.epoch == 0 and version is None:
        store.version.start()
    else:
        store.version.commit(version)
    return SharedWeights(root, wrappers, store, classes, others, time.perf_counter() - began)


def _join(params: list[nn.Parameter], slot: Slot, uses: Counter[int]) -> tuple[Tensor, ...]:
    """The slot's tensors over the parameters' memory, moved side by side first where possible."""
    views = [param.detach() for param in params]
    if len(params) == 1:
        return (views[0],)
    if not are_adjacent(views):
        if not all(owns_its_storage(view) and uses[_storage(view)] == 1 for view in views):
            return tuple(views)
        return (_adopt(params, slot),)
    return (fuse(views, slot.shape),)


def _adopt(params: list[nn.Parameter], slot: Slot) -> Tensor:
    """Move the parameters into one new block, each in a storage of its own; returns the fused tensor."""
    first = params[0]
    block = torch.empty(slot.shape, dtype=first.dtype, device=first.device)
    address, places = block.data_ptr(), []
    for param in params:
        place = tensor_at(address, param.shape, dtype=param.dtype, device=param.device, owner=block)
        places.append(place.copy_(param.detach()))
        address += place.nbytes
    for param, place in zip(params, places, strict=True):
        param.data = place
    return block


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class SharedWeights:
    """The standing agreement between a live module and a store: what is shared, and whether it still holds.

    Owned by the engine; it keeps the module alive. `check_storage` may be called from any thread, the rest
    from the one that owns the store.
    """

    def __init__(
        self,
        root: nn.Module,
        wrappers: Sequence[nn.Module],
        store: WeightStore,
        classes: Collection[str],
        others: Faults,
        seconds: float,
    ) -> None:
        self.module = root
        self._wrappers = wrappers
        self._store = store
        self._classes = classes
        self._others = others
        layers = lora_layers(root)
        self._base = Placement(
            root, lambda name: not of_adapter(name, layers), fix="Call share_weights(module) again."
        )
        self._look_at_adapters()
        self.receipt = self._receipt(seconds)

    def check_storage(self) -> None:
        """Raise unless every parameter, found through its module, still has the memory that the engine reads.

        Cheap enough for each admission: a few hundred parameters take well under a millisecond.

        Raises:
            WeightsInvalidError: a parameter was re-allocated, freed, cast, moved or replaced, or a module
                was. The store is invalid from then on, until the module is shared again, or, where it is one
                of an adapter, until `weights_changed`.
        """
        self._check(self._base)
        self._check(self._adapters)

    def check_structure(self) -> None:
        """Raise unless the module still computes what the engine does: classes, hooks, parameters,
        numbers.

        Raises:
            ConfigError: by name, as `share` does. The store is invalid until `weights_changed` finds it
                right.
        """
        try:
            check_module(self.module, self._classes, self._store, self._wrappers, self._others)
        except ConfigError as error:
            self._store.version.invalidate(f"the shared module was changed: {error}")
            raise

    def weights_changed(self, version: str | None = None) -> Receipt:
        """Commit the values that the trainer wrote in place, as a complete update of 0 bytes.

        Cheap enough for each optimizer step: a module that looks as it did isn't judged again. Otherwise its
        adapters are read anew: new, removed, moved and rescaled ones.

        Args:
            version: label of the weights; None as `WeightVersion.commit` says.

        Raises:
            WeightsInvalidError, ConfigError: as `check_storage` and `check_structure`.
        """
        began = time.perf_counter()
        if not self._seen.holds():
            self._check(self._base)
            self.check_structure()
            self._store.adapters = read_adapters(self.module, self._store.slots)
            self._look_at_adapters()
        self._store.settle()  # an optimizer may write on a stream of its own
        self._store.version.commit(version)
        self.receipt = self._receipt(time.perf_counter() - began)
        return self.receipt

    def _check(self, placement: Placement) -> None:
        try:
            placement.check()
        except WeightsInvalidError as error:
            self._store.version.invalidate(str(error))
            raise

    def _look_at_adapters(self) -> None:
        layers = lora_layers(self.module)
        self._adapters = Placement(
            self.module,
            lambda name: of_adapter(name, layers) and ".lora_dropout" not in name,
            fix="Call weights_changed(), which reads the adapters anew.",
        )
        self._seen = ModuleSnapshot(self.module, self._wrappers)

    def _receipt(self, seconds: float) -> Receipt:
        adapters = (name for name, _ in adapter_parameters(self._store.adapters))
        names = [*self._store.names.hf_names, *adapters]
        return self._store.receipt(loaded=names, nbytes=0, seconds=seconds, kind="shared")
