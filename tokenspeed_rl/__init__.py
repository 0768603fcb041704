"""An inference engine that lives inside the training process and can share its weights.

Public names load on first use: importing the package imports no torch and changes nothing in the process.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenspeed_rl import errors, requests, weights
    from tokenspeed_rl.async_llm import AsyncLLM
    from tokenspeed_rl.config import EngineConfig
    from tokenspeed_rl.engine import Engine
    from tokenspeed_rl.llm import LLM
    from tokenspeed_rl.protocol import EngineClient
    from tokenspeed_rl.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "Engine",
    "EngineClient",
    "EngineConfig",
    "SamplingParams",
    "__version__",
    "errors",
    "requests",
    "weights",
]

_HOMES = {
    "AsyncLLM": "async_llm",
    "Engine": "engine",
    "EngineClient": "protocol",
    "EngineConfig": "config",
    "LLM": "llm",
    "SamplingParams": "sampling_params",
}


def __getattr__(name: str) -> Any:
    if name in ("errors", "requests", "weights"):
        return import_module(f"{__name__}.{name}")
    if name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
