"""Adapters that the engine would compute otherwise than PEFT does: by the name of the layer, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from tokenspeed_rl.weights.adapters import entries, linear_places, lora_layers, settings
from tokenspeed_rl.weights.mapping import Slot

_OTHER_KINDS = ("lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


def adapter_faults(root: nn.Module, slots: Sequence[Slot]) -> Iterator[str]:
    """What makes the adapters in `root` compute something else than plain LoRA beside known projections.

    Their classes and shapes are judged here; memory, device and hooks as those of all else.
    """
    places = linear_places(slots)
    for module, layer in lora_layers(root).items():
        if module not in places:
            yield f"{module} has adapters, which the engine knows on q, k, v, o, gate, up, down projections"
            continue
        merged = vars(layer).get("merged_adapters")
        if merged:
            yield f"{module} has {', '.join(merged)} merged into its weight; call unmerge_adapter()"
        for name, variant in settings(layer, "lora_variant").items():
            yield f"{module} has {name!r} as a {type(variant).__name__}, not as plain LoRA"
        for kind in _OTHER_KINDS:
            if any(True for _ in getattr(layer, kind, ())):
                yield f"{module} has adapters of the kind {kind}, not plain LoRA"
        if entries(layer, "lora_A").keys() != entries(layer, "lora_B").keys():
            yield f"{module} has a lora_A without its lora_B, or the reverse"
            continue
        for name in entries(layer, "lora_A"):
            yield from _pair_faults(layer, module, name, places[module].shape)


def _pair_faults(layer: nn.Module, module: str, name: str, shape: tuple[int, ...]) -> Iterator[str]:
    down, up = entries(layer, "lora_A")[name], entries(layer, "lora_B")[name]
    for kind, linear in (("lora_A", down), ("lora_B", up)):
        if type(linear) is not nn.Linear:
            found = f"{type(linear).__module__}.{type(linear).__qualname__}"
            yield f"{module}.{kind}.{name} is {found}, not a plain Linear"
            return
        if linear.bias is not None:
            yield f"{module}.{kind}.{name} has a bias (lora_bias)"
    assert isinstance(down, nn.Linear) and isinstance(up, nn.Linear)
    rank, (outputs, inputs) = len(down.weight), shape
    if down.weight.shape != (rank, inputs) or up.weight.shape != (outputs, rank):
        shapes = f"{list(down.weight.shape)} and {list(up.weight.shape)}"
        yield f"{module} has {name!r} in shapes {shapes}, not [r, {inputs}] and [{outputs}, r]"
    if down.weight.dtype is not up.weight.dtype:
        yield f"{module} has {name!r} in {down.weight.dtype} and {up.weight.dtype}, not in one dtype"
    dropout = entries(layer, "lora_dropout").get(name)
    if type(dropout) not in (nn.Dropout, nn.Identity):
        yield f"{module}.lora_dropout.{name} is a {type(dropout).__name__}, not a Dropout"
    if not isinstance(scaling := settings(layer, "scaling").get(name), int | float):
        yield f"{module} has a {type(scaling).__name__} as the scaling of {name!r}, not a number"
