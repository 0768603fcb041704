"""LoRA adapters of a live PEFT module: which there are, where they lie, and which the engine can compute.

PEFT is judged by the names of its classes and never imported: it need not be installed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor, nn

from tokenspeed_rl.weights.mapping import Slot, canonical

_LAYERS = "peft.tuners.lora.layer"
_ADAPTABLE = re.compile(r"layers\.\d+\.(qkv|o|gate_up|down)\.weight")
"""Slots whose product the decoder adds adapters to."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to columns [start, stop) of a projection: scaling * up(down(x))."""

    module: str
    """Hugging Face name of the linear layer, such as ``model.layers.0.self_attn.q_proj``."""
    start: int
    stop: int
    down: Tensor
    """PEFT's ``lora_A``, [r, K], of any float dtype: what it is computed in."""
    up: Tensor
    """PEFT's ``lora_B``, [stop - start, r]."""
    scaling: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter: what it adds to which slots. Its tensors are the trainer's parameters themselves."""

    slots: Mapping[str, tuple[LowRank, ...]]
    """By slot name, in the order of the slot's parts; slots that it leaves alone are not there."""

    @property
    def parts(self) -> Iterator[LowRank]:
        """Of all slots."""
        return (part for parts in self.slots.values() for part in parts)

    @property
    def ranks(self) -> list[int]:
        """The different ranks, ascending."""
        return sorted({len(part.down) for part in self.parts})

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(part.down.nbytes + part.up.nbytes for part in self.parts)


def inside_peft(module: nn.Module) -> nn.Module | None:
    """The module within a PEFT wrapper of LoRA adapters; None where `module` is something else."""
    if _is(module, "peft.tuners.lora.model", "LoraModel"):
        return module.get_submodule("model")
    inner = module._modules.get("base_model") if type(module).__module__ == "peft.peft_model" else None
    return inner if _is(inner, "peft.tuners.lora.model", "LoraModel") else None


def is_lora(module: object) -> bool:
    """Whether `module` is PEFT's linear layer with adapters beside it."""
    return _is(module, _LAYERS, "Linear")


def bare(module: nn.Module | None) -> nn.Module | None:
    """The layer that adapters lie beside, or `module` itself."""
    return module._modules.get("base_layer") if module is not None and is_lora(module) else module


def lora_layers(root: nn.Module) -> dict[str, nn.Module]:
    """PEFT's layers in `root`, by the canonical name of the layer that each wraps."""
    return {
        canonical(name): module
        for name, module in root.named_modules(remove_duplicate=False)
        if is_lora(module)
    }


def of_adapter(name: str, layers: Collection[str]) -> bool:
    """Whether a canonical name is that of a module or parameter of an adapter beside one of `layers`."""
    layer, mark, _ = name.partition(".lora_")
    return bool(mark) and layer in layers


class LinearPlace(NamedTuple):
    """Which columns of which slot a linear layer computes."""

    slot: str
    start: int
    shape: tuple[int, ...]
    """Of its weight: outputs, inputs."""


def linear_places(slots: Sequence[Slot]) -> dict[str, LinearPlace]:
    """Where each linear layer that may have adapters is, by its canonical name."""
    places = {}
    for slot in slots:
        if _ADAPTABLE.fullmatch(slot.name):
            starts = accumulate((part.shape[0] for part in slot.parts), initial=0)
            for part, start in zip(slot.parts, starts, strict=False):
                places[part.hf_name.removesuffix(".weight")] = LinearPlace(slot.name, start, part.shape)
    return places


def read_adapters(root: nn.Module, slots: Sequence[Slot]) -> dict[str, Adapter]:
    """The adapters in a `root` that `adapter_faults` finds nothing wrong with, active or not, by name."""
    places, found = linear_places(slots), dict[str, dict[str, list[LowRank]]]()
    for module, layer in lora_layers(root).items():
        slot, start, (columns, _) = places[module]
        for name, down in entries(layer, "lora_A").items():
            up, scaling = entries(layer, "lora_B")[name], float(settings(layer, "scaling")[name])
            a, b = (linear.get_parameter("weight").detach() for linear in (down, up))
            part = LowRank(module, start, start + columns, a, b, scaling)
            found.setdefault(name, {}).setdefault(slot, []).append(part)
    return {
        name: Adapter({slot: tuple(sorted(parts, key=lambda p: p.start)) for slot, parts in by_slot.items()})
        for name, by_slot in found.items()
    }


def adapter_parameters(adapters: Mapping[str, Adapter]) -> Iterator[tuple[str, Tensor]]:
    """(name, live view) of every adapter's tensors: PEFT's names, without its prefix."""
    for name, adapter in adapters.items():
        for part in adapter.parts:
            yield f"{part.module}.lora_A.{name}.weight", part.down
            yield f"{part.module}.lora_B.{name}.weight", part.up


def forward_state(layer: nn.Module) -> tuple[dict[str, Any], ...]:
    """What the forward of PEFT's layer depends on beside modules and parameters."""
    scaling = {name: (type(value), value) for name, value in settings(layer, "scaling").items()}
    merged = dict.fromkeys(vars(layer).get("merged_adapters", ()))
    return scaling, merged, dict(settings(layer, "lora_variant"))


def _is(module: object, home: str, name: str) -> bool:
    return type(module).__module__ == home and type(module).__name__ == name


def entries(layer: nn.Module, kind: str) -> dict[str, nn.Module]:
    """The modules in one of the layer's dictionaries, by adapter."""
    held = layer._modules.get(kind)
    return (
        {} if held is None else {name: module for name, module in held._modules.items() if module is not None}
    )


def settings(layer: nn.Module, kind: str) -> dict[str, Any]:
    """One of the layer's plain dictionaries, by adapter."""
    held: dict[str, Any] = vars(layer).get(kind, {})
    return held
