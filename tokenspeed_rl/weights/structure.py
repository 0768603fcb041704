"""Does a live module compute what the engine would? Its classes, hooks and parameters, judged by name."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.weights.mapping import Slot, canonical
from tokenspeed_rl.weights.plain import lacks_memory
from tokenspeed_rl.weights.store import WeightStore

_WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}
_HARMLESS_HOOKS = frozenset({"output_capturing_hook", "make_inputs_require_grads"})
"""Forward hooks that transformers leaves on modules and that change no value: they record, or mark."""
_STATELESS = (nn.ModuleList, nn.Dropout)
"""Modules of torch's own that transformers' models have beside those with weights."""
_KINDS = {
    "norm": "Norm",
    "embed": "Embedding",
    "router": "TopKRouter",
    "experts.gate_up": "Experts",
    "experts.down": "Experts",
}
"""How a slot's name ends -> how the class of the module ends that holds its weight; others are Linear."""
_ROUTING = {"top_k": "num_experts_per_tok", "norm_topk_prob": "norm_topk_prob"}
"""What a router took out of the config when it was made, and may differ from it by now."""
_SHOWN = 3


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside data-parallel and compile wrappers, which compute the same."""
    while (attribute := _WRAPPERS.get(type(module).__name__)) is not None:
        module = getattr(module, attribute)
    return module


def check_module(root: nn.Module, classes: Collection[str], store: WeightStore) -> None:
    """Raise unless `root` computes what the engine does, with parameters that fit the store's slots.

    Refused: classes other than the family's, forward hooks and pre-hooks, a `forward` of an instance's own,
    parametrised or replaced projections, adapters and any other parameter that is no weight of the model,
    missing or mis-shaped weights, quantised, sharded, meta or freed tensors, another dtype or device than the
    store's. Accepted, as they leave forward values alone: backward hooks, gradient checkpointing, frozen
    parameters, the hooks by which transformers records hidden states; and train mode: what the engine
    computes is what the module does in eval mode, without dropout.

    Args:
        root: a transformers model with its head, unwrapped.
        classes: names of the transformers classes that the model is made of, such as ``Qwen3Attention``.
        store: its slots, dtype and device.

    Raises:
        ConfigError: the number of faults and the first few, by module or parameter name.
    """
    if not (_is_of(root, classes) and "For" in type(root).__name__):
        known = ", ".join(sorted(name for name in classes if "For" in name))
        raise ConfigError(
            f"the module to share must be exactly a transformers {known}",
            got=type(root),
            fix="Pass the model itself, not a part, a subclass or a wrapper of it.",
        )
    faults = [*_module_faults(root, classes, store.slots), *_parameter_faults(root, store)]
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise ConfigError(
            f"this {type(root).__name__} can't share its weights: {'; '.join(faults[:_SHOWN])}{more}",
            fix="Share the plain transformers model, without hooks, adapters or other modules added to it.",
        )


def _module_faults(root: nn.Module, classes: Collection[str], slots: Collection[Slot]) -> Iterator[str]:
    owners = _parameter_owners(slots)
    config = getattr(root, "config", None)
    activation = getattr(config, "hidden_act", None)
    for name, module in root.named_modules(remove_duplicate=False):
        if type(module).__name__ == "OptimizedModule":
            continue
        shown = name or "the module itself"
        expected = owners.get(canonical(name))
        if name.rpartition(".")[2] == "act_fn":
            if activation not in ACT2FN or type(module) is not type(ACT2FN[activation]):
                yield f"{shown} is {_full_name(module)}, not the config's {activation!r}"
        elif expected is not None:
            plain = type(module) in (nn.Linear, nn.Embedding) or _is_of(module, classes)
            if not plain or not type(module).__name__.endswith(expected):
                yield f"{shown} is {_full_name(module)}, not a plain {expected}"
            elif expected == "TopKRouter":
                yield from _routing_faults(shown, module, config)
        elif type(module) not in _STATELESS and not _is_of(module, classes):
            yield f"{shown} is {_full_name(module)}, which the engine does not know"
        yield from _overrides(shown, module)


def _routing_faults(shown: str, router: nn.Module, config: object) -> Iterator[str]:
    for attribute, field in _ROUTING.items():
        here, there = getattr(router, attribute, None), getattr(config, field, None)
        if here != there:
            yield f"{shown}.{attribute} is {here}, not the config's {there}"


def _parameter_owners(slots: Collection[Slot]) -> dict[str, str]:
    """Name of each module that holds weights -> how its class name must end."""
    owners: dict[str, str] = {}
    for slot in slots:
        kind = next((kind for ending, kind in _KINDS.items() if slot.name.endswith(ending)), "Linear")
        owners.update((part.hf_name.rpartition(".")[0], kind) for part in slot.parameters)
    return {"lm_head": "Linear", **owners}


def _is_of(module: nn.Module, classes: Collection[str]) -> bool:
    return type(module).__name__ in classes and type(module).__module__.startswith("transformers.")


def _overrides(shown: str, module: nn.Module) -> Iterator[str]:
    home = str(getattr(type(module).forward, "__module__", None))
    if "forward" in vars(module):
        yield f"{shown} has a forward of its own"
    elif not home.startswith(("transformers.", "torch.")):
        yield f"{shown} has its class's forward replaced by one of {home}"
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for hook in hooks.values():
            if not _is_harmless(hook):
                yield f"{shown} has a forward hook ({getattr(hook, '__qualname__', type(hook).__name__)})"


def _is_harmless(hook: object) -> bool:
    return getattr(hook, "__name__", None) in _HARMLESS_HOOKS and str(
        getattr(hook, "__module__", "")
    ).startswith("transformers.")


def _parameter_faults(root: nn.Module, store: WeightStore) -> Iterator[str]:
    shapes = {part.hf_name: part.shape for slot in store.slots for part in slot.parameters}
    found = {canonical(name): param for name, param in root.named_parameters(remove_duplicate=False)}
    head = found.pop("lm_head.weight", None) if store.names.tied else None
    embedding = found.get(store.names.embedding)
    if head is not None and embedding is not None and address_of(head) != address_of(embedding):
        yield "lm_head.weight is a parameter of its own, but the config ties it to the embedding"
    for name in shapes:
        if name not in found:
            yield f"{name} is missing"
    for name, param in found.items():
        if name not in shapes:
            yield f"{name} is no weight of the model"
            continue
        kind = _kind(param, store)
        if kind is not None:
            yield f"{name} is {kind}"
        elif tuple(param.shape) != shapes[name]:
            yield f"{name} has shape {list(param.shape)}, not {list(shapes[name])}"


def _kind(param: Tensor, store: WeightStore) -> str | None:
    """What makes a parameter unfit, whatever its shape."""
    if type(param) is not nn.Parameter or type(param.data) is not torch.Tensor:
        return f"a {type(param.data).__name__} (sharded or quantised), not a plain parameter"
    if param.device.type == "meta":
        return "on the meta device, without values"
    if param.layout is not torch.strided or not param.is_floating_point():
        return f"{param.dtype} {param.layout}, not a plain float tensor"
    if param.dtype is not store.dtype:
        return f"{param.dtype}, but the engine's dtype is {store.dtype}"
    if not same_device(param.device, store.device):
        return f"on {param.device}, but the engine's device is {store.device}"
    if lacks_memory(param):
        return "without its memory, which was freed or cut short"
    return None


def address_of(tensor: Tensor) -> int:
    """Where the values are; 0 for tensors without a storage here (sharded, fake)."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def same_device(left: torch.device, right: torch.device) -> bool:
    """Whether two devices are one; a CUDA device without an index is the current one."""
    if left.type != "cuda" or right.type != "cuda":
        return left.type == right.type
    current = torch.cuda.current_device() if None in (left.index, right.index) else None
    return (left.index if left.index is not None else current) == (
        right.index if right.index is not None else current
    )


def _full_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
