"""What a module that was found right looks like, to see at a glance that it still does."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tokenspeed_rl.weights.adapters import forward_state, is_lora


class ModuleSnapshot:
    """Everything by which a module could come to compute something else, or from other memory.

    Per module: its class, a `forward` of its own, hooks, children and parameters; per class: its `forward`;
    per parameter: address, size of the storage, shape, strides, dtype and device; per layer of PEFT's: its
    scaling, and what is merged. Values don't count. It keeps what it has seen alive, so that no identity is
    used twice.
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
        self._activation = self._look_at_activation()
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
            self._look_at_places() == self._places
            and all(kind.forward is forward for kind, forward in self._forwards.items())
            and self._look_at_activation() == self._activation
            and all(forward_state(module) == state for module, state in self._adapted)
        )

    def _look_at_places(self) -> list[tuple[object, ...]]:
        return [
            (param.data_ptr(), storage.nbytes(), param.dtype, param.device, param.shape, param.stride())
            for param, storage in zip(self._params, self._storages, strict=True)
        ]

    def _look_at_activation(self) -> object:
        return getattr(getattr(self._root, "config", None), "hidden_act", None)
