"""Which weights and adapter scalings of a live module are not the engine's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tokenspeed_rl.weights.adapters import Adapter, lora_layers, settings
from tokenspeed_rl.weights.mapping import canonical
from tokenspeed_rl.weights.plain import fault_of
from tokenspeed_rl.weights.store import WeightStore, same_values


@torch.no_grad()
def differing_weights(store: WeightStore, module: nn.Module) -> dict[str, str]:
    """Hugging Face name -> how the module's parameter, cast to the store's dtype, differs from the engine's.
    Bits count, but that a NaN equals itself. On the loop's thread."""
    found = {canonical(name): param for name, param in module.named_parameters(remove_duplicate=False)}
    differing = {}
    for name, ours in store.parameters():
        theirs = found.get(name)
        how = "the module has none" if theirs is None else _difference(ours, theirs)
        if how is not None:
            differing[name] = how
    return differing


def differing_scalings(adapter: Adapter, name: str, module: nn.Module) -> dict[str, str]:
    """Hugging Face name of a layer, with that of its scaling -> how the scaling of the module's adapter
    `name` differs there from the engine's `adapter`, read when it last looked. Layers where the module has
    none are left to `differing_weights`."""
    layers, differing = lora_layers(module), {}
    for part in adapter.parts:
        held = settings(layers[part.module], "scaling") if part.module in layers else {}
        if name in held and held[name] != part.scaling:
            differing[f"{part.module}.scaling.{name}"] = f"{part.scaling:g} here, {held[name]} in the module"
    return differing


def _difference(ours: Tensor, theirs: Tensor) -> str | None:
    fault = fault_of(theirs)
    if fault is not None:
        return f"the module's is {fault}"
    if ours.shape != theirs.shape:
        return f"{list(ours.shape)} here, {list(theirs.shape)} in the module"
    if same_values(ours, theirs, ours.dtype):
        return None
    cast = theirs.to(ours.device, ours.dtype)
    return f"by up to {float((ours.float() - cast.float()).abs().max()):.3g}"
