"""Admission: whether requests run, and what a pause makes of those that are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tokenspeed_rl.errors import EngineStateError, RequestError
from tokenspeed_rl.lifecycle.reply import answer

MODES = ("abort", "wait", "keep", "retract")
Held = TypeVar("Held")


@dataclass(slots=True)
class Drain:
    """A call that is answered once nothing that can run is left."""

    what: str
    reply: Future[Any]
    busy: Callable[[], bool]
    """Whether it must still wait."""
    then: Callable[[], Any]
    """What happens at the end; its result, or error, is the answer."""
    withdrawn: Callable[[], Any]
    """The answer when a resume comes first."""


class Admission(Generic[Held]):
    """Running, or paused with a mode; perhaps draining. The loop's thread owns it; any may read properties.

    While a drain is going on new requests are held outside the queue, so that those already there can run
    out. Without one they may queue: nothing is run for them while paused.
    """

    def __init__(
        self,
        *,
        end_all: Callable[[], None],
        retract_all: Callable[[], None],
        enqueue: Callable[[Iterable[Held]], None],
        come_to_rest: Callable[[], None],
    ) -> None:
        """What it acts upon: end every unfinished request; return the running ones to the queue without
        their KV; queue requests that were held; wait until the device has done what was begun."""
        self._mode: str | None = None
        self._before: str | None = None  # the mode that the last pause replaced
        self._reply: Future[bool] | None = None  # of the last pause
        self._unheard: Future[bool] | None = None  # of a pause whose caller left as it was answered
        self._drain: Drain | None = None
        self._held: list[Held] = []
        self._end_all = end_all
        self._retract_all = retract_all
        self._enqueue = enqueue
        self._come_to_rest = come_to_rest

    @property
    def mode(self) -> str | None:
        """The mode of the pause, None on a running engine. A pause whose caller gave up counts no more."""
        return self._before if self._gone else self._mode

    @property
    def draining(self) -> str | None:
        """What is being drained for, None without a drain."""
        drain = self._drain
        return None if drain is None or drain.reply.done() else drain.what

    @property
    def steps(self) -> bool:
        """Whether the loop may step."""
        return self._mode is None or self._drain is not None

    @property
    def frozen(self) -> bool:
        """Whether requests in flight keep their KV whatever happens to the weights."""
        return self._mode == "keep"

    def hold(self, requests: Iterable[Held]) -> bool:
        """Keep new requests out of the queue until the drain has ended; False without a drain."""
        if self._drain is None:
            return False
        self._held += requests
        return True

    def pause(self, mode: str, reply: Future[bool], *, busy: Callable[[], bool]) -> None:
        """Pause, or change the mode of a pause; `reply` becomes True when the mode's promise holds, False if
        a resume comes first. `busy` tells whether a request is left that can run.

        Raises:
            RequestError: unknown mode. EngineStateError: a drain is going on. Nothing changed.
        """
        if not (isinstance(mode, str) and mode in MODES):
            raise RequestError(f"mode must be one of {', '.join(MODES)}", got=mode, fix="Choose one of them.")
        self.refuse_while_draining("pause")
        self.settle()  # a pause or drain whose caller has gone
        self._reply, self._before, self._mode = reply, self._mode, mode
        if mode == "abort":
            self._end_all()
        elif mode == "retract":
            self._retract_all()
        if mode == "wait":
            self._drain = Drain("a pause that waits", reply, busy, self._at_rest, lambda: False)
        else:
            answer(reply, self._at_rest)

    def drain(
        self, what: str, then: Callable[[], Any], reply: Future[Any], *, busy: Callable[[], bool]
    ) -> None:
        """On a running engine: hold new requests back until no longer `busy`, then answer with `then`."""

        def withdrawn() -> None:
            raise EngineStateError(f"{what} was withdrawn by a resume before it began", fix="Call it again.")

        self.refuse_while_draining("release")
        self.settle()
        self._drain = Drain(what, reply, busy, then, withdrawn)

    def refuse_while_draining(self, call: str) -> None:
        """Raises EngineStateError during a drain."""
        if self.draining is not None:
            raise EngineStateError(
                f"{call} is refused: {self.draining} is waiting for requests to end",
                fix="Wait for it, abort the requests, or resume, which withdraws it.",
            )

    def resume(self, mode: str | None = None) -> None:
        """Run again, or go back to an earlier pause's `mode` without acting on any request; a pending drain
        is withdrawn."""
        drain, self._drain, self._mode, self._reply = self._drain, None, mode, None
        if drain is not None:
            answer(drain.reply, drain.withdrawn)
        self._let_in()

    def withdraw(self, reply: Future[bool]) -> None:
        """The pause of this reply counts no more, if it is still the last one: its caller has gone without
        the answer. From any thread; the next `settle` does the rest."""
        self._unheard = reply

    def settle(self) -> None:
        """End the drain if nothing is left, or its caller has gone. Between steps, after every command."""
        drain = self._drain
        if drain is not None and (drain.reply.done() or not drain.busy()):
            answer(drain.reply, drain.then)  # a submitter finds the drain, or what it was for
            self._drain = None
            self._let_in()
        if self._gone:
            self._mode, self._reply = self._before, None

    def _at_rest(self) -> bool:
        self._come_to_rest()
        return True

    @property
    def _gone(self) -> bool:
        """Whether the caller of the last pause gave up before it had the answer."""
        reply = self._reply
        return reply is not None and (reply.cancelled() or reply is self._unheard)

    def _let_in(self) -> None:
        held, self._held = self._held, []
        self._enqueue(held)
