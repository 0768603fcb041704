"""Sessions: token sequences that grow turn by turn.

Plain state without keys and values: those of former turns come out of the prefix cache while it has them, so
whatever drops KV leaves a session as it is. One lock guards all of it.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenspeed_rl.errors import EngineStateError, RequestError
from tokenspeed_rl.sampling_params import check_integer


@dataclass(slots=True, eq=False)
class Session:
    """An open session, or one that was closed while somebody still holds a turn of it."""

    id: str
    capacity: int
    tokens: tuple[int, ...] = ()
    """Prompts and outputs of all turns so far."""
    live: Turn | None = None
    last: Turn | None = None
    """The turn that brought the last of `tokens`, until another begins."""
    closed: bool = False


class Turn:
    """A prompt that continues a session as it was when the turn was made. Every method is called under the
    lock of its `Sessions`.

    It reserves the session from `begin` to its end. Until then nothing of the session changes, so a request
    that is refused on its way has nothing to give back.
    """

    def __init__(self, session: Session) -> None:
        """Raises as `check`."""
        self.tokens = session.tokens
        self.rid = ""
        self._session = session
        self.check()

    def check(self) -> None:
        """Raise what forbids this turn to begin.

        Raises:
            RequestError: the session was closed.
            EngineStateError: it has a live turn, or had another one since this was made.
        """
        session = self._session
        if session.closed:
            raise unknown(session.id)
        if session.live is not None:
            raise EngineStateError(
                f"session {session.id!r} has a live turn, the request {session.live.rid!r}",
                fix="Take its result, or abort it, before the next turn.",
            )
        if session.tokens is not self.tokens:
            raise EngineStateError(
                f"session {session.id!r} went on with another turn while this one was prepared",
                fix="Submit it again to continue from there.",
            )

    def room(self, prompt_len: int, wanted: int | None) -> int:
        """How many tokens may follow a prompt of `prompt_len`, the session's own included; `wanted` are asked
        for, None: as many as there is room for.

        Raises:
            RequestError: they exceed the session's capacity.
        """
        session, room = self._session, self._session.capacity - prompt_len
        if (1 if wanted is None else wanted) > room:
            new = prompt_len - len(self.tokens)
            asked = "an output" if wanted is None else f"max_new_tokens={wanted}"
            raise RequestError(
                f"session {session.id!r} holds {len(self.tokens)} of {session.capacity} tokens, which leaves "
                f"no room for {new} new ones and {asked}",
                fix="Ask for less, or open a session with a larger capacity_of_str_len.",
            )
        return room

    def begin(self, rid: str) -> None:
        """Reserve the session for the request `rid`, right after `check`."""
        self.rid = rid
        self._session.live, self._session.last = self, None

    def end(self, tokens: Sequence[int] | None) -> None:
        """The request ended: with `tokens`, its whole prompt and output, or None: nothing of it is kept."""
        session = self._session
        if session.live is not self:  # closed, or given up
            return
        session.live = None
        if tokens is not None:
            session.tokens, session.last = tuple(tokens), self

    def give_up(self) -> None:
        """Whoever asked does not get the answer: the session is as before this turn, unless another one has
        begun after it. Safe in a finaliser; any number of times."""
        session = self._session
        if session.live is self:
            session.live = None
        elif session.last is self:
            session.tokens, session.last = self.tokens, None


class Sessions:
    """All open sessions. From any thread."""

    def __init__(
        self, lock: threading.RLock | None = None, abort: Callable[[str], None] = lambda rid: None
    ) -> None:
        """`lock`: the one under which turns begin and end; None: one of its own. `abort` ends the request of
        a live turn whose session is closed, under the lock."""
        self._lock = lock or threading.RLock()
        self._abort = abort
        self._open: dict[str, Session] = {}

    def open(self, capacity: int, session_id: str | None = None) -> str | None:
        """Open a session of at most `capacity` tokens, and return its id, a random one where none is given;
        None: that one is open already.

        Raises:
            RequestError: the capacity is no positive integer, the id no string or empty.
        """
        capacity = check_integer("capacity_of_str_len", capacity, low=1)
        if session_id is not None and not (isinstance(session_id, str) and session_id):
            raise RequestError(
                "session_id must be a non-empty string", got=session_id, fix="Leave it out for a random one."
            )
        name = session_id or uuid.uuid4().hex
        with self._lock:
            if name in self._open:
                return None
            self._open[name] = Session(name, capacity)
        return name

    def close(self, session_id: str) -> None:
        """Forget a session and its tokens; its live turn is aborted.

        Raises:
            RequestError: no such session is open.
        """
        with self._lock:
            session = self._find(session_id)
            del self._open[session.id]
            live, session.live, session.last, session.closed = session.live, None, None, True
            if live is not None:
                self._abort(live.rid)

    def turn(self, session_id: str) -> Turn:
        """A turn that would continue the session as it is now.

        Raises:
            RequestError: no such session is open. EngineStateError: it has a live turn.
        """
        with self._lock:
            return Turn(self._find(session_id))

    def snapshot(self) -> dict[str, int]:
        """How many are open, how many tokens they hold, and how many have a live turn. Without the lock: a
        step that hangs may hold it."""
        sessions = list(self._open.values())
        return {
            "count": len(sessions),
            "tokens": sum(len(session.tokens) for session in sessions),
            "live": sum(session.live is not None for session in sessions),
        }

    def _find(self, session_id: object) -> Session:
        session = self._open.get(session_id) if isinstance(session_id, str) else None
        if session is None:
            raise unknown(session_id)
        return session


def unknown(session_id: object) -> RequestError:
    """The error of an id that is not open."""
    return RequestError("no session of this id is open", got=session_id, fix="Open it with open_session.")


def open_already(session_id: object) -> RequestError:
    """The error of an id that can't be opened because it is."""
    return RequestError(
        "a session of this id is open already", got=session_id, fix="Close it first, or leave the id out."
    )
