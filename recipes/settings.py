"""A recipe's settings: dataclass fields with bounds, checked before anything is built, refused in a line."""

import dataclasses
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from transformers.utils.logging import disable_progress_bar

from tokenspeed_rl.errors import ConfigError

T = TypeVar("T")


def setting(
    default: Any,
    *,
    above: float | None = None,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A dataclass field whose value lies in (above, ...), in [low, high], or in `choices`; None passes."""
    bounds = {"above": above, "low": low, "high": high, "choices": choices}
    return dataclasses.field(default=default, metadata={key: b for key, b in bounds.items() if b is not None})


def parse(raw: DictConfig, schema: type[T]) -> T:
    """The composed config as an object of `schema`, every value checked; else one line ends the process."""
    try:
        known_only(raw)
        config = OmegaConf.to_object(raw)
        assert isinstance(config, schema)
        check(config)
    except (ConfigError, OmegaConfBaseException) as error:
        raise SystemExit(f"config error: {one_line(error)}") from error
    return config


def launch(main: Callable[[], None]) -> None:
    """Runs a `hydra.main` function; a config it can't work with ends the process with one line."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises: for us to shorten, and real failures stay whole
    disable_progress_bar()  # of transformers, which would tear the display's bars
    # transformers imports DeepSpeed when it saves a model, which then warns that a CPU is a CPU.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    try:
        main()
    except (HydraException, OmegaConfBaseException, ConfigError) as error:
        sys.exit(f"config error: {one_line(error)}")


def check(config: Any, prefix: str = "") -> None:
    """ConfigError, naming the key, for the first value out of bounds in `config` and its dataclasses."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            check(value, f"{prefix}{field.name}.")
        elif wanted := complaint(value, field.metadata):
            raise ConfigError(f"{prefix}{field.name} must be {wanted}", got=value)
    if hasattr(config, "validate"):
        try:
            config.validate()
        except ConfigError as error:
            raise ConfigError(f"{prefix}{error}") from error


def complaint(value: Any, bounds: Mapping[str, Any]) -> str | None:
    """What `value` should have been, or None when it keeps its bounds."""
    if value is None:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return "finite"
    if "choices" in bounds and value not in bounds["choices"]:
        return "one of " + ", ".join(bounds["choices"])
    if "above" in bounds and not value > bounds["above"]:
        return f"above {bounds['above']}"
    if "low" in bounds and not value >= bounds["low"]:
        return f"at least {bounds['low']}"
    if "high" in bounds and not value <= bounds["high"]:
        return f"at most {bounds['high']}"
    return None


def known_only(node: DictConfig, prefix: str = "") -> None:
    """ConfigError for a key that a `+key=value` override put where the dataclass has no such field."""
    kind = OmegaConf.get_type(node)
    if not dataclasses.is_dataclass(kind):
        return
    names = {field.name for field in dataclasses.fields(kind)}
    for name in map(str, node):
        if name not in names:
            raise ConfigError(f"{prefix}{name} is no setting; here are: {', '.join(sorted(names))}")
        if not OmegaConf.is_missing(node, name) and isinstance(child := node[name], DictConfig):
            known_only(child, f"{prefix}{name}.")


def one_line(error: BaseException) -> str:
    """What is wrong, and with which key, without line breaks: Hydra's error, or omegaconf's inside it."""
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException):
        error = cause
    message = " ".join(re.split(r"full_key:|Config search path:|See https:", str(error))[0].split())
    key = getattr(error, "full_key", None)
    return f"{key}: {message}" if key and key not in message else message
