"""Being told of every optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from tokenspeed_rl.errors import ConfigError


def watch(optimizer: Any, callback: Callable[[], object]) -> RemovableHandle:
    """Call `callback` on the stepping thread after every `optimizer.step()` that really stepped.

    Accelerate's wrapped optimizer is watched inside, so steps that it skips (gradient accumulation, overflow)
    don't count. An exception in `callback` reaches the caller of `step()`, after the step.

    Returns:
        A handle whose `remove()` ends it.

    Raises:
        ConfigError: something else than a `torch.optim.Optimizer`, such as DeepSpeed's, which writes the
            parameters after its inner optimizer has stepped.
    """
    inner = optimizer
    while type(inner).__module__.startswith("accelerate.") and hasattr(inner, "optimizer"):
        inner = inner.optimizer
    if not isinstance(inner, torch.optim.Optimizer):
        raise ConfigError(
            "watch needs a torch.optim.Optimizer",
            got=type(inner).__qualname__,
            fix="Call weights_changed() yourself after each step.",
        )

    def after_step(*_: object) -> None:
        callback()

    return inner.register_step_post_hook(after_step)
