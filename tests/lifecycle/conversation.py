"""A session of an engine, and the tokens that it should hold."""

from __future__ import annotations

from typing import Any

from tests.lifecycle.rollouts import EXACT, ask, take
from tests.tiny import Tiny
from tokenspeed_rl import Engine


class Conversation:
    """Turns of one session; every answer is held against a recompute of the whole from its first token."""

    def __init__(self, engine: Engine, model: Any, capacity: int = 250) -> None:
        self.engine, self.model = engine, model
        self.id = engine.open_session(capacity)
        self.tokens: list[int] = []

    def ask(self, new: list[int], fields: dict[str, Any] | None = None, **params: Any) -> Any:
        """Submit a turn now."""
        return ask(self.engine, new, {"session_params": {"id": self.id}, **(fields or {})}, **params)

    def turn(self, new: list[int], fields: dict[str, Any] | None = None, **params: Any) -> Any:
        """The result of a turn, which is checked."""
        result = take(self.engine, self.ask(new, fields, **params))
        return self.heard(new, result, params.get("temperature", 1.0))

    def heard(self, new: list[int], result: Any, temperature: float = 1.0) -> Any:
        """This was the answer to `new`, drawn at `temperature`."""
        whole = [*self.tokens, *new]
        assert result["meta_info"]["prompt_tokens"] == len(whole)
        assert Tiny.gap(self.model, whole, result, temperature) < EXACT
        self.tokens = [*whole, *result["output_ids"]]
        return result
