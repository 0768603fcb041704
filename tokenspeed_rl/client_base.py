"""What the parts of `AsyncLLM` have in common: the core behind them, and how they answer."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from tokenspeed_rl.core.engine_core import EngineCore
from tokenspeed_rl.errors import (
    EngineDeadError,
    EngineShutdownError,
    RequestError,
    TokenSpeedError,
    nearest,
)

R = TypeVar("R")


class Reply(tuple[Any, ...]):
    """A tuple that unpacks to exactly its items and carries the report of the call as `.report`."""

    report: Any

    def __new__(cls, items: tuple[Any, ...], report: Any = None) -> Reply:
        """`items` with `report` beside them."""
        reply = super().__new__(cls, items)
        reply.report = report
        return reply


class ClientBase:
    """Any method may be called from any thread, any coroutine awaited on any event loop."""

    refusal: str = ""
    """Why the last call that was refused was."""

    _core: EngineCore

    def check_alive(self) -> None:
        """Raises EngineShutdownError or EngineDeadError once the engine has ended."""
        self._core.loop.check_alive()

    def check_outside(self, call: str) -> None:
        """Raises EngineStateError inside the iterator of a weight update."""
        self._core.life.slot.check_outside(call)

    async def _command(self, command: Callable[[], R]) -> R:
        """Run `command` on the loop's thread between two steps."""
        return await asyncio.wrap_future(self._core.loop.call(command))

    async def _answer(self, doing: Awaitable[tuple[Any, ...]], *rest: Any) -> Any:
        """What `doing` gives, or for its refusal the Reply (False, why, *rest) with the error as report."""
        try:
            return await doing
        except TokenSpeedError as error:
            return Reply((False, self._refused(error), *rest), report=error)

    def _refused(self, error: TokenSpeedError) -> str:
        """Note why a call is refused; what no answer can be given for is raised."""
        if isinstance(error, EngineShutdownError | EngineDeadError):
            raise error
        error.__traceback__ = None  # it is returned, not raised: no frame needs to live on
        self.refusal = str(error)
        return self.refusal


async def on_thread(work: Callable[[Callable[[], None]], R]) -> R:
    """Run blocking `work` on a thread while the event loop goes on. It gets a function that raises once this
    is cancelled, to be called at every wait; the cancellation is over when `work` has ended."""
    cancelled = threading.Event()

    def check() -> None:
        if cancelled.is_set():
            raise asyncio.CancelledError

    task = asyncio.ensure_future(asyncio.to_thread(work, check))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        cancelled.set()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # looked at, so that nobody warns of it
        raise


def expect(obj: Any, kind: type[R]) -> R:
    """`obj`, which must be a `kind`. Raises RequestError."""
    if not isinstance(obj, kind):
        raise RequestError(
            f"this takes a {kind.__name__}", got=obj, fix=f"Pass requests.{kind.__name__}(...)."
        )
    return obj


def make_request(kind: type[R], fields: Mapping[str, Any], **named: Any) -> R:
    """A struct of the protocol. Raises RequestError for a name that is no field of it."""
    names = set(inspect.signature(kind).parameters)
    for name in fields:
        if name not in names:
            raise RequestError(f"{name!r} is no field of {kind.__name__}", fix=nearest(name, names))
    try:
        return kind(**named, **fields)
    except TypeError as error:
        raise RequestError(str(error)) from error
