"""Residency: which of the engine's memory is there, tag by tag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tokenspeed_rl.errors import EngineStateError, RequestError


class Part(Protocol):
    """The memory of one tag."""

    def release(self) -> None:
        """Give it back. Whatever raises has changed nothing."""

    def map(self) -> None:
        """Take it again, contents undefined. Whatever raises has changed nothing."""

    def undo_map(self) -> None:
        """Give back what `map` just took: a later part of the same wake had no room."""

    def restore(self) -> None:
        """Every part is mapped: bring back what a release saved, and keep it until that has succeeded."""


class Residency:
    """Which tags are released. Owned by the loop's thread; any may read `released`."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        """`parts` by tag, in the order in which a wake maps them."""
        self._parts = dict(parts)
        self.released: frozenset[str] = frozenset()

    @property
    def asleep(self) -> bool:
        """Whether anything is released."""
        return bool(self.released)

    def sleeping(self, tags: Sequence[str] = ()) -> tuple[str, ...]:
        """Those of `tags` (none named: of all) that are released. Raises RequestError for unknown ones."""
        return self._ordered(self.released & frozenset(self._known(list(tags) or list(self._parts))))

    def to_release(self, tags: str | Sequence[str] | None) -> tuple[str, ...]:
        """The tags that a release means, None: all that are resident.

        Raises:
            RequestError: unknown tags. EngineStateError: one is released already.
        """
        return self._named(tags, "released", self.released)

    def to_resume(self, tags: str | Sequence[str] | None) -> tuple[str, ...]:
        """The tags that a wake means, None: all that sleep. Raises as `to_release`."""
        return self._named(tags, "resident", frozenset(self._parts) - self.released)

    def release(self, tags: Sequence[str]) -> None:
        """Release tags that are resident; should one fail, those before it are released and it is not."""
        for tag in tags:
            self._parts[tag].release()
            self.released |= {tag}

    def resume(self, tags: Sequence[str]) -> None:
        """Take back tags that are released, all or none."""
        mapped: list[Part] = []
        try:
            for tag in tags:
                self._parts[tag].map()
                mapped.append(self._parts[tag])
            for part in mapped:
                part.restore()
        except BaseException:
            for part in reversed(mapped):
                part.undo_map()
            raise
        self.released -= set(tags)

    def require(self, *tags: str) -> None:
        """Raise EngineStateError where any of the tags (none named: any at all) is released."""
        if missing := self._ordered(self.released & set(tags or self._parts)):
            raise EngineStateError(
                f"the engine sleeps: {', '.join(missing)} released",
                fix="Call resume_memory_occupation(), or use `with engine.resident():`.",
            )

    def _named(
        self, tags: str | Sequence[str] | None, state: str, already: frozenset[str]
    ) -> tuple[str, ...]:
        if tags is None:
            return self._ordered(frozenset(self._parts) - already)
        wanted = frozenset(self._known([tags] if isinstance(tags, str) else tags))
        if done := self._ordered(already & wanted):
            raise EngineStateError(
                f"already {state}: {', '.join(done)}; nothing was changed",
                got=tags,
                fix="Name the others only, or pass None for whatever is left.",
            )
        return self._ordered(wanted)

    def _known(self, tags: Any) -> Sequence[str]:
        named = isinstance(tags, Sequence) and len(tags) > 0
        if not (named and all(isinstance(tag, str) and tag in self._parts for tag in tags)):
            raise RequestError(
                f"each tag must be one of {', '.join(self._parts)}", got=tags, fix="None means all."
            )
        found: Sequence[str] = tags
        return found

    def _ordered(self, tags: frozenset[str]) -> tuple[str, ...]:
        return tuple(tag for tag in self._parts if tag in tags)
