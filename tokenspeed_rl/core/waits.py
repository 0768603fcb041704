"""Long calls as generators of what they wait for, to be run on a thread or on an event loop.

Such a generator yields futures of the loop's, or None: a moment in which nothing is half done. `drive` waits
on a thread, `drive_async` on an event loop. Whatever is raised at such a wait, a cancellation too, reaches
the generator, which puts everything in order before it goes on up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import closing
from typing import Any, TypeVar

R = TypeVar("R")
Waits = Generator[Future[Any] | None, Any, R]


def go_on() -> None:
    """Nobody interrupts."""


def drive(waits: Waits[R], interrupted: Callable[[], None] = go_on) -> R:
    """Run `waits` to their end on this thread; what `interrupted` raises, where nothing is half done, ends
    them."""
    proceed: Callable[[Any], Future[Any] | None] = waits.send
    value: Any = None
    with closing(waits):
        while True:
            try:
                waited = proceed(value)
            except StopIteration as end:
                result: R = end.value
                return result
            finally:
                value = None  # an error that is raised here must not find itself in this frame, for ever
            try:
                if waited is None:
                    interrupted()
                proceed, value = waits.send, None if waited is None else waited.result()
            except BaseException as error:
                interrupted = go_on
                proceed, value = waits.throw, error
            finally:
                waited = None


async def drive_async(waits: Waits[R]) -> R:
    """Run `waits` to their end on this event loop, which goes on with its other tasks between them.

    What was posted to the loop runs, whenever this is cancelled, and however often.
    """
    proceed: Callable[[Any], Future[Any] | None] = waits.send
    value: Any = None
    with closing(waits):
        while True:
            try:
                waited = proceed(value)
            except StopIteration as end:
                result: R = end.value
                return result
            finally:
                value = None  # as above
            try:
                if waited is None:
                    await asyncio.sleep(0)
                else:
                    answer = asyncio.wrap_future(waited)
                    answer.add_done_callback(_look_at)
                    value = await asyncio.shield(answer)
                proceed = waits.send
            except BaseException as error:
                proceed, value = waits.throw, error
            finally:
                waited = None


def _look_at(answer: asyncio.Future[Any]) -> None:
    """Whoever waited for it may be gone; nobody is to be warned of that."""
    if not answer.cancelled():
        answer.exception()
