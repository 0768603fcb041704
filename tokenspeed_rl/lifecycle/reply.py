"""Answering a caller that may have gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_claiming = threading.Lock()


def answer(reply: Future[Any], command: Callable[[], Any]) -> bool:
    """Run `command` into its reply; its exception is the caller's. False, and nothing ran, where the caller
    has gone or another thread answers."""
    with _claiming:  # two threads may want to answer: the loop's, and one that ends the engine
        if reply.done() or reply.running() or not reply.set_running_or_notify_cancel():
            return False
    try:
        result = command()
    except BaseException as error:
        reply.set_exception(error)
        del reply  # which the error would find in this frame, for ever
    else:
        reply.set_result(result)
    return True
