"""The compilations to check: those that the modules of `tokenspeed_rl_kernels.gpu` list."""

import importlib
import pkgutil

from tokenspeed_rl_kernels import gpu
from tokenspeed_rl_kernels.gpu.kernel import Spec
from tokenspeed_rl_kernels.registry import INTERPRETED


def all_specs() -> dict[str, Spec]:
    """Every ``SPECS`` of every module, by name.

    Raises:
        RuntimeError: Triton was told to interpret kernels, so that none can be compiled.
        ValueError: two have one name.
    """
    if INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET=1 is set: nothing can be compiled; unset it and start again")
    found: dict[str, Spec] = {}
    for module in pkgutil.iter_modules(gpu.__path__, f"{gpu.__name__}."):
        for spec in getattr(importlib.import_module(module.name), "SPECS", ()):
            if spec.name in found:
                raise ValueError(
                    f"two specs are named {spec.name!r}, one in {module.name}; name one otherwise"
                )
            found[spec.name] = spec
    return found
