"""Load, state, settings and logs, as an engine's blocking verbs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed_rl.client_base import make_request
from tokenspeed_rl.client_state import StateMembers
from tokenspeed_rl.llm import LLM
from tokenspeed_rl.requests import ConfigureLoggingReq, GetLoadReqOutput


class StateVerbs:
    """`StateMembers`, blocking. Where the client answers False, these raise."""

    client: StateMembers
    llm: LLM

    def get_load(self) -> list[GetLoadReqOutput]:
        """See `AsyncLLM.load`. At once, whatever else the facade is busy with."""
        return self.client.load()

    def get_internal_state(self) -> list[dict[Any, Any]]:
        """See `AsyncLLM.internal_state`. At once, as `get_load`."""
        return self.client.internal_state()

    def set_internal_state(
        self,
        server_args: Mapping[str, Any] | None = None,
        *,
        weight_version: str | None = None,
        **fields: Any,
    ) -> list[bool]:
        """Change settings while the engine runs: `set_internal_state(max_running_requests=8)`.

        Args:
            server_args: fields of `EngineConfig` as a dict, beside those given by keyword.
            weight_version: another label for the same weights.
            fields: fields of `EngineConfig`; which may change, `AsyncLLM.set_internal_state` says.

        Raises:
            RequestError, ConfigError: one that can't change, or not to that value. EngineStateError: it would
                change nothing on this engine. Nothing changed.
        """
        merged = fields if server_args is None else server_args
        if isinstance(merged, Mapping):
            merged = {**merged, **fields}
        self.llm.run(self.client.change_settings(merged, weight_version))
        return [True]

    def configure_logging(self, **fields: Any) -> None:
        """See `AsyncLLM.configure_logging`; `fields` are those of `ConfigureLoggingReq`."""
        self.client.configure_logging(make_request(ConfigureLoggingReq, fields))
