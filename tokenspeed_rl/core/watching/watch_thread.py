"""The thread that looks whether the loop is stuck, and says so with its stack."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress

from tokenspeed_rl.lifecycle.watchdog import Overdue, Watchdog

LOOKS = 4
"""In a watchdog's timeout."""
SHORTEST_NAP, LONGEST_NAP = 0.01, 5.0
CLOSE_SECONDS = 10.0
"""How long shutdown waits for a message that a logging handler keeps it from getting out."""


class WatchThread:
    """Looks while `watchdog` has a timeout; ends nothing and nobody."""

    def __init__(self, watchdog: Watchdog, watched: Callable[[], threading.Thread], log: logging.Logger):
        """`watched` is the loop's thread."""
        self._watchdog = watchdog
        self._watched = watched
        self._log = log
        self._wake = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def set_timeout(self, timeout: float | None) -> None:
        """Look with this timeout from now on; None: don't."""
        with self._wake:
            self._watchdog.timeout = timeout
            if timeout is not None and self._thread is None:
                thread = threading.Thread(target=self._run, name="tokenspeed_rl-watchdog", daemon=True)
                with suppress(RuntimeError):  # none is to be had: `Watchdog.overdue` still knows
                    thread.start()
                    self._thread = thread
            self._wake.notify_all()

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            with self._wake:
                if self._closing:
                    return
                timeout = self._watchdog.timeout
                nap = None if timeout is None else min(max(timeout / LOOKS, SHORTEST_NAP), LONGEST_NAP)
                self._wake.wait(nap)
            self._watchdog.look(self._stuck, self._freed)

    def _stuck(self, overdue: Overdue) -> None:
        frame = sys._current_frames().get(self._watched().ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "its thread has ended\n"
        self._log.error("%s; the engine is unhealthy until it does. The loop is at:\n%s", overdue, stack)

    def _freed(self, overdue: Overdue) -> None:
        self._log.warning("the %s that had not returned for %.1f s has", overdue.what, overdue.seconds)
