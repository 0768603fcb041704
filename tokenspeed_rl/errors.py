"""The errors the engine raises. Each says what is wrong, what it got and how to put it right.

`str(error)` reads ``what (got ...). fix``; the three parts are also attributes. Errors pickle and copy whole.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_NOTHING = object()
_LONGEST_REPR = 200


class TokenSpeedError(Exception):
    """Base of every error of this package.

    Args:
        what: the rule that was broken, or the thing that failed, naming the argument.
        got: the offending value; its `repr` is kept, shortened, never the object itself.
        fix: what the caller can do about it, as a sentence.
    """

    def __init__(self, what: str, *, got: object = _NOTHING, fix: str | None = None) -> None:
        self.what = what
        self.got = None if got is _NOTHING else shorten(got)
        self.fix = fix
        super().__init__(what)

    def __str__(self) -> str:
        message = self.what if self.got is None else f"{self.what} (got {self.got})"
        return message if self.fix is None else f"{message.rstrip('.')}. {self.fix}"


class ConfigError(TokenSpeedError, ValueError):
    """A setting, model or checkpoint that no engine can be built from; all problems at once."""


class RequestError(TokenSpeedError, ValueError):
    """A request that is malformed or that this engine can never serve. Nothing of it was queued."""


class EngineStateError(TokenSpeedError):
    """The call does not fit the engine's state (paused, asleep, updating ...). Nothing was changed."""


class WeightsInvalidError(EngineStateError):
    """The weights are not a complete set, so nothing may be computed with them until a complete update."""


class WeightUpdateError(TokenSpeedError):
    """A weight update that was refused or failed; the message names offenders and says what holds now."""


class OutOfMemoryError(TokenSpeedError, MemoryError):
    """Memory that the engine needed is not there; what was mapped before the call is mapped still.

    Attributes:
        wanted: bytes the call needed.
        free: bytes that were free.
    """

    def __init__(self, what: str, wanted: int, free: int, *, fix: str | None = None) -> None:
        super().__init__(f"{what}: {wanted:,} bytes wanted, {free:,} free", fix=fix)
        self.wanted = wanted
        self.free = free
        self.args = (what, wanted, free)  # what unpickling constructs with


class EngineTimeoutError(TokenSpeedError, TimeoutError):
    """The caller's timeout passed. The request was aborted, or the pending control call withdrawn."""


class EngineDeadError(TokenSpeedError):
    """The engine's loop failed and serves nothing any more; the first cause is chained (`__cause__`)."""


class PeerFailedError(TokenSpeedError):
    """Another rank failed in a step that every rank makes together.

    Attributes:
        rank: the rank that failed, within the engine's process group.
        cause: that rank's error, as text.
    """

    def __init__(self, rank: int, cause: object, *, fix: str | None = None) -> None:
        text = f"{type(cause).__name__}: {cause}" if isinstance(cause, BaseException) else str(cause)
        super().__init__(f"rank {rank} failed: {text}", fix=fix)
        self.rank = rank
        self.cause = text
        self.args = (rank, text)  # what unpickling constructs with


class EngineShutdownError(TokenSpeedError):
    """The engine was shut down: before the call, or while it waited."""


def nearest(name: object, valid: Iterable[str]) -> str:
    """The `fix` for an unknown `name`: the closest valid one, or all of them when none is close."""
    names = sorted(valid)
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    return f"Did you mean {close[0]!r}?" if close else f"Valid names: {', '.join(names)}."


def shorten(value: object) -> str:
    """`repr(value)`, cut in the middle when it is too long for a message."""
    try:
        text = repr(value)
    except Exception as error:  # of the caller's own class, or an int of too many digits
        text = f"a {type(value).__name__} that can't be shown: {error}"
    half = _LONGEST_REPR // 2
    return text if len(text) <= _LONGEST_REPR else f"{text[:half]} ... {text[-half:]}"
