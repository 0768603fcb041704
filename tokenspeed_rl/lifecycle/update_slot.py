"""At most one weight update at a time, and nothing of the engine's from inside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tokenspeed_rl.errors import EngineStateError

_iterating: ContextVar[tuple[UpdateSlot, ...]] = ContextVar("tokenspeed_rl_iterating", default=())


class UpdateSlot:
    """Free, claimed by an update that has written nothing yet, or writing: then the loop takes no step.

    Owned by the loop's thread, but for `iterating`, which the updating thread enters; any may read.
    """

    def __init__(self) -> None:
        self.writing = False
        self._owner: object | None = None
        self._in_iterator = False

    @property
    def taken(self) -> bool:
        """Whether an update is going on."""
        return self._owner is not None

    def refuse(self, call: str) -> None:
        """Raises EngineStateError while an update is going on."""
        if self.taken:
            raise EngineStateError(
                f"{call} is refused: a weight update is going on", fix="Call it when that has returned."
            )

    def refuse_while_writing(self) -> None:
        """Raises EngineStateError from an update's first write to its end."""
        if self.writing:
            raise EngineStateError(
                "the weights can't be read: an update is half written", fix="Call it when that has returned."
            )

    def claim(self, owner: object) -> None:
        """The update `owner` begins. Raises EngineStateError while another is going on."""
        self.refuse("another weight update")
        self._owner = owner

    def end(self, owner: object) -> bool:
        """The update of `owner` is over; False if it never began, or was over already."""
        if self._owner is not owner:
            return False
        self._owner, self.writing = None, False
        return True

    @contextmanager
    def iterating(self) -> Iterator[None]:
        """Within, code of the caller's runs: what it calls of this engine would wait for the update's end."""
        token = _iterating.set((*_iterating.get(), self))
        self._in_iterator = True
        try:
            yield
        finally:
            self._in_iterator = False
            _iterating.reset(token)

    def check_outside(self, call: str) -> None:
        """Raises EngineStateError inside the iterator of an update, on whichever thread it works."""
        if self._in_iterator and self in _iterating.get():
            raise EngineStateError(
                f"{call} was called from inside the iterator of a weight update, which it would wait for",
                fix="Call it before or after the update.",
            )
