"""EngineConfig: every setting of an engine, each with its meaning and its default."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from tokenspeed_rl.errors import ConfigError, nearest, shorten

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclasses.dataclass(slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; what each is, docs/settings.md and the source say.

    Fields hold plain numbers, strings and bools, so that omegaconf can structure them. Nothing is checked at
    construction; `validate` reports every problem at once.
    """

    model_path: str | None = None
    """Hugging Face directory or hub id; None: what the engine was constructed with."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; None: the default branch."""
    served_model_name: str | None = None
    """Name reported to clients; None: the last part of `model_path`."""
    dtype: str = "auto"
    """Of the weights: "auto" (the model's own, float32 when unstated), "float32", "bfloat16", "float16"."""
    compute_dtype: str | None = None
    """Dtype of the computation when it differs from the weights'; only None (the same) in this version."""
    device: str = "auto"
    """"auto" (the live model's, else CUDA where there is one), "cpu", "cuda" or "cuda:<index>"."""
    model_impl: str = "auto"
    """Model code: only "auto", the engine's own decoder."""
    tp_size: int = 1
    """Ranks that one model is split over; only 1 in this version."""
    max_model_len: int | None = None
    """Most tokens of prompt and output together; None: the model's own limit."""
    max_running_requests: int = 256
    """Most samples computed in one step."""
    page_size: int = 16
    """Tokens per page of the KV cache; prefixes are shared in whole pages."""
    max_total_tokens: int | None = None
    """KV capacity in tokens; None: from `mem_fraction`."""
    mem_fraction: float = 0.5
    """Share of the free memory that KV takes when `max_total_tokens` is None; above 0, at most 1."""
    reserve_bytes: int = 0
    """Bytes of the free memory that are left to the trainer before that share is taken, at each wake."""
    chunked_prefill_size: int = 2048
    """Most prompt tokens computed in one step, beside one per decoding sample; longer prompts take more."""
    enable_prefix_caching: bool = True
    """Reuse the KV of finished requests for prompts that begin alike under the same weights."""
    attention_backend: str = "auto"
    """"torch": plain torch; "triton": kernels, on CUDA or where Triton interprets them; "auto": "triton" on
    CUDA, else "torch"."""
    enable_cuda_graph: bool = True
    """Capture steps in which every request decodes as CUDA graphs; needs CUDA and the Triton backend, else it
    does nothing."""
    deterministic: bool = False
    """Bitwise equal logprobs for every batch composition; only False in this version."""
    seed: int = 0
    """Keys the draws of requests without a seed, and random weights (`load_format="dummy"` or a config)."""
    weight_version: str = "default"
    """Label of the weights the engine starts with."""
    weights_backup: str = "none"
    """Where weights of the engine's own go when their memory is released: "none" (they become invalid until a
    complete update) or "cpu" (host memory, pinned for a GPU, and back at the wake)."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer: prompts are token ids and `text` is ""."""
    load_format: str = "auto"
    """"auto" and "safetensors" read safetensors files; "dummy": seeded random weights, every byte written."""
    expert_distribution_dir: str | None = None
    """Folder for dumps of expert distribution, one JSON file each, mode 0600; None: they are only kept in the
    internal state."""
    log_level: str = "warning"
    """From which level on this engine's messages reach the `tokenspeed_rl` logger's handlers: debug, info,
    warning, error or critical."""
    log_requests: bool = False
    """Log a line about every request that ends, at info and whatever `log_level` is."""
    log_requests_level: int = 0
    """0: ids and counts, 1: also sampling parameters, 2: also prompts and outputs, shortened."""
    dump_requests_folder: str = ""
    """Where ended requests are written as JSON lines, in files of mode 0600; "": nowhere."""
    dump_requests_threshold: int = 1000
    """Samples per file of the dump."""
    watchdog_timeout: float | None = 300.0
    """Seconds after which a step or command that has not returned makes the engine unhealthy; None: never."""

    def validate(self) -> None:
        """Check every field.

        Raises:
            ConfigError: all problems, one a line: what, got, fix.
        """
        problems = _wrong_types(self)
        broken = {name for name, _ in problems}
        problems += [(name, text) for name, text in _wrong_values(self) if name not in broken]
        if len(problems) == 1:
            raise ConfigError(problems[0][1])
        if problems:
            lines = "".join(f"\n  {text}" for _, text in problems)
            raise ConfigError(f"{len(problems)} settings are wrong:{lines}")


def from_overrides(config: EngineConfig | None, overrides: Mapping[str, Any]) -> EngineConfig:
    """A validated copy of `config` (None: the defaults) with `overrides` applied; `config` stays as it is.

    `torch.dtype` and `torch.device` objects are taken as their names.

    Raises:
        ConfigError: an unknown field, naming the nearest valid one; or whatever `validate` finds.
    """
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    unknown = [name for name in overrides if name not in names]
    if unknown:
        lines = [f"{name!r} is no field of EngineConfig. {nearest(name, names)}" for name in unknown]
        raise ConfigError("\n  ".join(lines))
    if config is not None and not isinstance(config, EngineConfig):
        raise ConfigError("config must be an EngineConfig", got=config, fix="Pass EngineConfig(...).")
    made = dataclasses.replace(config or EngineConfig(), **overrides)
    for name in ("dtype", "compute_dtype", "device"):
        value = getattr(made, name)
        if type(value).__module__.partition(".")[0] == "torch":
            setattr(made, name, str(value).removeprefix("torch."))
    made.validate()
    return made


def _problem(name: str, rule: str, got: object, fix: str) -> tuple[str, str]:
    return name, f"{name} must be {rule} (got {shorten(got)}). {fix}"


def _wrong_types(config: EngineConfig) -> list[tuple[str, str]]:
    accepts: dict[str, tuple[type, ...]] = {
        "str": (str,),
        "str | None": (str, type(None)),
        "int": (int,),
        "int | None": (int, type(None)),
        "float": (float, int),
        "float | None": (float, int, type(None)),
        "bool": (bool,),
    }
    problems = []
    for field in dataclasses.fields(config):
        value, kind = getattr(config, field.name), str(field.type)
        if not isinstance(value, accepts[kind]) or (isinstance(value, bool) and kind != "bool"):
            fix = f"The default is {field.default!r}."
            problems.append(_problem(field.name, f"of type {kind}", value, fix))
    return problems


def _wrong_values(config: EngineConfig) -> list[tuple[str, str]]:
    problems = []

    def require(name: str, holds: bool, rule: str, fix: str) -> None:
        if not holds:
            problems.append(_problem(name, rule, getattr(config, name), fix))

    def one_of(name: str, *values: object, why: str = "") -> None:
        listed = ", ".join(map(repr, values))
        rule = f"one of {listed}" if len(values) > 1 else listed
        require(name, getattr(config, name) in values, rule, why or f"Choose one of {listed}.")

    later = "This version supports nothing else: leave it at its default."
    one_of("compute_dtype", None, why=later)
    one_of("tp_size", 1, why=later)
    one_of("deterministic", False, why=later)
    one_of("weights_backup", "none", "cpu")
    one_of("model_impl", "auto", why=later)
    one_of("attention_backend", "auto", "torch", "triton")
    one_of("dtype", "auto", "float32", "bfloat16", "float16")
    one_of("load_format", "auto", "safetensors", "dummy")
    one_of("log_level", *_LOG_LEVELS)
    device = isinstance(config.device, str) and _DEVICE.fullmatch(config.device) is not None
    require("device", device, "auto, cpu, cuda or cuda:<index>", "Nothing else has kernels here.")
    counts = (
        "max_model_len",
        "max_running_requests",
        "page_size",
        "max_total_tokens",
        "chunked_prefill_size",
        "dump_requests_threshold",
    )
    for name in counts:
        value = getattr(config, name)
        require(name, value is None or _in_64_bits(value, 1), "in 1 .. 2**63 - 1", "Set a positive number.")
    if isinstance(config.page_size, int) and isinstance(config.max_total_tokens, int):
        fits = config.max_total_tokens >= config.page_size
        require("max_total_tokens", fits, f"at least page_size, {config.page_size}", "It is in whole pages.")
    fraction = config.mem_fraction
    in_range = isinstance(fraction, float | int) and math.isfinite(fraction) and 0 < fraction <= 1
    require("mem_fraction", in_range, "above 0 and at most 1", "0.5 is half of the free memory.")
    one_of("log_requests_level", 0, 1, 2)
    patience = config.watchdog_timeout
    bounded = patience is None or (isinstance(patience, float | int) and 0 < patience < math.inf)
    require("watchdog_timeout", bounded, "above 0 and finite, or None", "None never looks.")
    require("reserve_bytes", _in_64_bits(config.reserve_bytes, 0), "in 0 .. 2**63 - 1", "0 reserves nothing.")
    require("seed", _in_64_bits(config.seed, 0), "in 0 .. 2**63 - 1", "Any such number will do.")
    for name in ("weight_version", "model_path", "revision", "served_model_name", "expert_distribution_dir"):
        require(name, getattr(config, name) != "", "a non-empty string", "Leave it out for the default.")
    return problems


def _in_64_bits(value: object, low: int) -> bool:
    return isinstance(value, int) and low <= value < 2**63
