"""What a module that was found right looks like, to see at a glance that it still does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from torch import nn

from tokenspeed_rl.weights.adapters import forward_state, is_lora

_CONFIG = ("hidden_act", "is_causal", "layer_types", "num_hidden_layers", "sliding_window")
"""What of a config forwards read each time, and what modules are held against."""

_PLAIN = (int, float, type(None))


class ModuleSnapshot:
    """Everything by which a module could come to compute something else, or from other memory.

    Per module: its class, a `forward` of its own, hooks, children, parameters and plain numbers, such as a
    router's `top_k`; per class: its `forward`; per parameter: address, size of the storage, shape, strides,
    dtype and device; per layer of PEFT's: its scaling, and what is merged; some of the config. Values of
    weights don't count, nor does the mode. It keeps what it has seen alive, so that no identity is used
    twice.
    """

    def __init__(self, root: nn.Module, wrappers: Sequence[nn.Module] = ()) -> None:
        """`wrappers` are looked at too, without what they hold."""
        self._root = root
        modules = [*wrappers, *root.modules()]
        self._modules = [
            (
                module.__dict__,
                module,
                type(module),
                module.__dict__.get("forward"),
                dict(module._forward_hooks),
                dict(module._forward_pre_hooks),
                dict(module._modules),
                list(map(id, module._parameters.values())),
            )
            for module in modules
        ]
        params = [param for module in modules for param in module._parameters.values() if param is not None]
        self._params = list({id(param): param for param in params}.values())
        self._storages = [param.untyped_storage() for param in self._params]
        self._places = self._look_at_places()
        kinds = {type(module) for module in modules}
        self._forwards = {kind: kind.forward for kind in kinds}
        self._config = self._look_at_config()
        self._numbers = [each for module in modules if (each := _numbers(module)) is not None]
        self._adapted = [(module, forward_state(module)) for module in modules if is_lora(module)]

    def holds(self) -> bool:
        """Whether all of it is as it was; False may be harmless, and wants a closer look."""
        for held, module, kind, forward, hooks, pre_hooks, children, params in self._modules:
            if (
                type(module) is not kind
                or held.get("forward") is not forward
                or held["_forward_hooks"] != hooks
                or held["_forward_pre_hooks"] != pre_hooks
                or held["_modules"] != children
                or list(map(id, held["_parameters"].values())) != params
            ):
                return False
        return (
            self._numbers_hold()
            and self._look_at_places() == self._places
            and all(kind.forward is forward for kind, forward in self._forwards.items())
            and self._look_at_config() == self._config
            and all(forward_state(module) == state for module, state in self._adapted)
        )

    def _numbers_hold(self) -> bool:
        try:
            return all(read(held) == numbers for held, read, numbers in self._numbers)
        except Exception:  # one is gone, or is no number any more and can't be compared to one
            return False

    def _look_at_places(self) -> list[tuple[object, ...]]:
        return [
            (param.data_ptr(), storage.nbytes(), param.dtype, param.device, param.shape, param.stride())
            for param, storage in zip(self._params, self._storages, strict=True)
        ]

    def _look_at_config(self) -> list[object]:
        config = getattr(self._root, "config", None)
        found = [getattr(config, name, None) for name in _CONFIG]
        return [tuple(value) if isinstance(value, list) else value for value in found]


def _numbers(module: nn.Module) -> tuple[dict[str, Any], Callable[[dict[str, Any]], Any], Any] | None:
    """The module's attributes, what reads those of them that are plain numbers or None, and what it read.

    Not those of PEFT's layers, whose `forward_state` says what counts, nor private ones, in which torch keeps
    its books.
    """
    if is_lora(module):
        return None
    held = module.__dict__
    names = [name for name, value in held.items() if name[0] != "_" and isinstance(value, _PLAIN)]
    names = [name for name in names if name != "training"]
    if not names:
        return None
    read = itemgetter(*names)
    return held, read, read(held)
