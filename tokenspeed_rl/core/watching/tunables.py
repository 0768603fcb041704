"""Settings that can change while the engine runs."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenspeed_rl.config import EngineConfig
from tokenspeed_rl.errors import EngineStateError, RequestError, nearest
from tokenspeed_rl.weights.incoming import is_label

LOGGING = ("log_requests", "log_requests_level", "dump_requests_folder", "dump_requests_threshold")
"""Those that any thread may change; the others change on the loop's."""
KV_SIZE = ("mem_fraction", "reserve_bytes")
"""Read whenever the KV cache is mapped."""
Setter = Callable[[EngineConfig], None]
LoggingSetter = Callable[[EngineConfig, Path | None], None]


class Tunables:
    """Changes an engine's config, all of a call's fields or none, and tells who holds copies of them."""

    def __init__(
        self,
        config: EngineConfig,
        setters: Mapping[str, Setter],
        *,
        logging: LoggingSetter,
        rename: Callable[[str], None],
        lock: threading.RLock,
    ) -> None:
        """`setters`, by field, take the changed config; `logging` does for all of `LOGGING`, with the folder
        that was prepared, if any; `rename` labels the weights."""
        self._config = config
        self._setters = setters
        self._logging = logging
        self._rename = rename
        self._lock = lock

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that can change."""
        return tuple(sorted((*self._setters, *LOGGING, *KV_SIZE)))

    def folder_to_prepare(self, fields: Mapping[str, Any], label: str | None = None) -> str | None:
        """The folder that `change` wants prepared for these fields, without the lock, as that takes as long
        as its disk; None: none.

        Raises:
            RequestError, ConfigError, EngineStateError: as `change`, so that none is made for nothing.
        """
        if not (isinstance(fields, Mapping) and fields.get("dump_requests_folder")):
            return None
        self._checked(fields, label)
        return str(fields["dump_requests_folder"])

    def change(self, fields: Mapping[str, Any], label: str | None = None, folder: Path | None = None) -> None:
        """Make the fields what they say, and call the weights `label` (None: as before). `folder` is what
        `prepare_folder` made of the `folder_to_prepare`.

        Raises:
            RequestError, ConfigError: a field that can't change, or not to that value. EngineStateError: it
                would change nothing on this engine. Nothing changed.
        """
        with self._lock:  # any thread may change the logging
            made = self._checked(fields, label)
            if any(name in LOGGING for name in fields):
                self._logging(made, folder)
            for name in fields:
                setattr(self._config, name, getattr(made, name))
            for name in fields:
                if name in self._setters:
                    self._setters[name](self._config)
            if label is not None:
                self._rename(label)

    def _checked(self, fields: Mapping[str, Any], label: str | None) -> EngineConfig:
        if not isinstance(fields, Mapping):
            raise RequestError("server_args must map fields of EngineConfig to values", got=fields)
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        if unknown := [name for name in fields if name not in known]:
            raise RequestError(
                f"{unknown[0]!r} is no field of EngineConfig", fix=nearest(unknown[0], self.names)
            )
        if fixed := [name for name in fields if name not in self.names]:
            raise RequestError(
                "this can't change while the engine runs", got=fixed[0], fix=f"Can: {', '.join(self.names)}."
            )
        if label is not None and not is_label(label):
            raise RequestError(
                "weight_version must be a non-empty string of UTF-8", got=label, fix='Say "step-7".'
            )
        made = dataclasses.replace(self._config, **fields)
        made.validate()
        if made.max_total_tokens is not None and any(name in fields for name in KV_SIZE):
            raise EngineStateError(
                "max_total_tokens is set and alone sizes the KV cache",
                got={name: fields[name] for name in KV_SIZE if name in fields},
                fix="Leave these out, or make an engine without max_total_tokens.",
            )
        return made
