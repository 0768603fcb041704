"""Does a live module compute what the engine would? Its classes, hooks and parameters, judged by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.weights.adapter_faults import adapter_faults
from tokenspeed_rl.weights.adapters import inside_peft, is_lora, lora_layers, of_adapter
from tokenspeed_rl.weights.mapping import Slot, canonical
from tokenspeed_rl.weights.plain import lacks_memory
from tokenspeed_rl.weights.store import WeightStore

_WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}
_HARMLESS_HOOKS = frozenset(
    {"output_capturing_hook", "make_inputs_require_grads", "make_inputs_require_grad"}
)
"""Forward hooks of transformers and PEFT that change no value: they record, or mark."""
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
Faults = Callable[[nn.Module], Iterable[str]]
"""What is wrong with an unwrapped module, in words."""
_SHOWN = 3


def no_faults(root: nn.Module) -> Iterable[str]:
    """Nothing is."""
    return ()


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside data-parallel and compile wrappers, which compute the same, and inside PEFT's, whose
    adapters lie beside its layers."""
    return list(_layers_of(module))[-1]


def peft_wrappers(module: nn.Module) -> list[nn.Module]:
    """PEFT's wrappers around the module that `unwrap` finds, outermost first."""
    return [wrapper for wrapper in _layers_of(module) if inside_peft(wrapper) is not None]


def _layers_of(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    attribute = _WRAPPERS.get(type(module).__name__)
    inner = inside_peft(module) if attribute is None else getattr(module, attribute)
    if inner is not None:
        yield from _layers_of(inner)


def check_module(
    root: nn.Module,
    classes: Collection[str],
    store: WeightStore,
    wrappers: Sequence[nn.Module] = (),
    others: Faults = no_faults,
) -> None:
    """Raise unless `root` computes what the engine does, with parameters that fit the store's slots.

    Refused: classes other than the family's, forward hooks and pre-hooks, a `forward` of an instance's own,
    parametrised or replaced projections, adapters other than plain LoRA beside projections, any other
    parameter that is no weight of the model, missing or mis-shaped weights, quantised, sharded, meta or freed
    tensors, another dtype (adapters aside) or device than the store's. Accepted, as they leave forward values
    alone: backward hooks, gradient checkpointing, frozen parameters, the hooks by which transformers records
    hidden states; and train mode: what the engine computes is what the module does in eval mode, without
    dropout.

    Args:
        root: a transformers model with its head, unwrapped.
        classes: names of the transformers classes that the model is made of, such as ``Qwen3Attention``.
        store: its slots, dtype and device.
        wrappers: of PEFT, around it.
        others: finds the faults that neither classes nor names nor shapes show, such as another `top_k`.

    Raises:
        ConfigError: the number of faults and the first few, by module or parameter name.
    """
    if not (_is_of(root, classes) and "For" in type(root).__name__):
        known = ", ".join(sorted(name for name in classes if "For" in name))
        raise ConfigError(
            f"the module to share must be exactly a transformers {known}",
            got=type(root),
            fix="Pass the model itself, not a part, a subclass or a wrapper of it (of PEFT's, only LoRA's).",
        )
    faults = [
        *_wrapper_faults(wrappers),
        *adapter_faults(root, store.slots),
        *_module_faults(root, classes, store.slots),
        *_parameter_faults(root, store),
        *others(root),
    ]
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise ConfigError(
            f"this {type(root).__name__} can't share its weights: {'; '.join(faults[:_SHOWN])}{more}",
            fix="Share the transformers model as the config makes it, plain or with PEFT's plain LoRA; "
            "undo what was changed or added.",
        )


def _module_faults(root: nn.Module, classes: Collection[str], slots: Collection[Slot]) -> Iterator[str]:
    owners, layers = _parameter_owners(slots), lora_layers(root)
    activation = getattr(getattr(root, "config", None), "hidden_act", None)
    for name, module in root.named_modules(remove_duplicate=False):
        if type(module).__name__ == "OptimizedModule":
            continue
        shown = name or "the module itself"
        expected = owners.get(canonical(name))
        if is_lora(module) or of_adapter(canonical(name), layers):
            pass  # `adapter_faults` judges them
        elif name.rpartition(".")[2] == "act_fn":
            if activation not in ACT2FN or type(module) is not type(ACT2FN[activation]):
                yield f"{shown} is {_full_name(module)}, not the config's {activation!r}"
        elif expected is not None:
            plain = type(module) in (nn.Linear, nn.Embedding) or _is_of(module, classes)
            if not plain or not type(module).__name__.endswith(expected):
                yield f"{shown} is {_full_name(module)}, not a plain {expected}"
        elif type(module) not in _STATELESS and not _is_of(module, classes):
            yield f"{shown} is {_full_name(module)}, which the engine does not know"
        yield from _overrides(shown, module)


def _wrapper_faults(wrappers: Sequence[nn.Module]) -> Iterator[str]:
    return (fault for wrapper in wrappers for fault in _overrides(_full_name(wrapper), wrapper))


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
    elif not home.startswith(("transformers.", "torch.", _home(module))):
        yield f"{shown} has its class's forward replaced by one of {home}"
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for hook in hooks.values():
            if not _is_harmless(hook):
                yield f"{shown} has a forward hook ({getattr(hook, '__qualname__', type(hook).__name__)})"


def _home(module: nn.Module) -> str:
    """Where the forward of PEFT's own classes must be from."""
    return "peft." if is_lora(module) or inside_peft(module) is not None else "torch."


def _is_harmless(hook: object) -> bool:
    home = str(getattr(hook, "__module__", ""))
    return getattr(hook, "__name__", None) in _HARMLESS_HOOKS and home.startswith(("transformers.", "peft."))


def _parameter_faults(root: nn.Module, store: WeightStore) -> Iterator[str]:
    shapes = {part.hf_name: part.shape for slot in store.slots for part in slot.parameters}
    layers = lora_layers(root)
    found = {canonical(name): param for name, param in root.named_parameters(remove_duplicate=False)}
    head = found.pop("lm_head.weight", None) if store.names.tied else None
    embedding = found.get(store.names.embedding)
    if head is not None and embedding is not None and address_of(head) != address_of(embedding):
        yield "lm_head.weight is a parameter of its own, but the config ties it to the embedding"
    for name in shapes:
        if name not in found:
            yield f"{name} is missing"
    for name, param in found.items():
        adapter = of_adapter(name, layers)
        if name not in shapes and not adapter:
            yield f"{name} is no weight of the model"
            continue
        kind = _kind(param, store, cast=adapter)
        if kind is not None:
            yield f"{name} is {kind}"
        elif not adapter and tuple(param.shape) != shapes[name]:
            yield f"{name} has shape {list(param.shape)}, not {list(shapes[name])}"


def _kind(param: Tensor, store: WeightStore, *, cast: bool) -> str | None:
    """What makes a parameter unfit, whatever its shape; with `cast` its dtype may be another than the
    store's."""
    if type(param) is not nn.Parameter or type(param.data) is not torch.Tensor:
        return f"a {type(param.data).__name__} (sharded or quantised), not a plain parameter"
    if param.device.type == "meta":
        return "on the meta device, without values"
    if param.layout is not torch.strided or not param.is_floating_point():
        return f"{param.dtype} {param.layout}, not a plain float tensor"
    if param.dtype is not store.dtype and not cast:
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
