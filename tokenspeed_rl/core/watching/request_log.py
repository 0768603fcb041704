"""Samples that ended, logged and dumped by a thread of its own, so that no disk and no handler is waited for
by the loop."""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tokenspeed_rl.config import EngineConfig
from tokenspeed_rl.core.request import Request
from tokenspeed_rl.core.watching.dump_files import DumpFiles
from tokenspeed_rl.core.watching.engine_log import EngineLog
from tokenspeed_rl.core.watching.request_record import describe, record

R = TypeVar("R")
MOST_WAITING = 4096
"""Samples that wait to be written; of more, the newest are dropped and counted."""
CLOSE_SECONDS = 10.0
"""How long shutdown waits for what is left to be written."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is to be done with a sample that ends now."""

    level: int | None = None
    """Of its log line; None: none."""
    files: DumpFiles | None = None


class RequestLog:
    """Off until `configure` says otherwise. Log lines go out at info, through a logger whose level is info
    whatever the engine's `log_level`: a handler of `tokenspeed_rl` or above it (`logging.basicConfig()` makes
    one) shows them. A dump that fails stops by itself; requests never notice."""

    def __init__(
        self, tokenizer: Callable[[], Any], log: logging.Logger, stopped: Callable[[DumpFiles], None]
    ) -> None:
        """`tokenizer` is asked for when there is something to write; `log` takes the messages about this;
        `stopped` is called with the files of a dump that failed."""
        self.trouble: str | None = None
        """Why the last dump stopped."""
        self.written = 0
        """Samples dumped."""
        self.dropped = 0
        """Samples neither logged nor dumped, since too many waited for it."""
        self._tokenizer = tokenizer
        self._log = log
        self._stopped = stopped
        self._lines = EngineLog("tokenspeed_rl.requests", "info")
        self._wanted = _Wanted()
        self._queue: deque[tuple[Request, _Wanted]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._idle = True
        self._thread: threading.Thread | None = None

    def configure(self, config: EngineConfig, folder: Path | None = None) -> None:
        """As the config says, for samples that end from now on. Under the loop's lock, so it touches no disk:
        `folder` is what `prepare_folder` made of the config's, where that was just named."""
        files, asked = self._wanted.files, (config.dump_requests_folder, config.dump_requests_threshold)
        if files is None or files.error or files.asked != asked:
            place = folder if files is None else folder or files.folder
            assert place is not None or not config.dump_requests_folder
            files = DumpFiles(asked, place) if place and config.dump_requests_folder else None
        self._wanted = _Wanted(config.log_requests_level if config.log_requests else None, files)
        if config.log_requests and not self._lines.hasHandlers():
            self._log.warning("log_requests is on, but no logging handler is there: logging.basicConfig()")

    def stop(self, files: DumpFiles) -> bool:
        """Dump no more where that failed; whether that is what was asked for. Under the loop's lock."""
        stopped = self._wanted.files is files
        if stopped:
            self._wanted = _Wanted(self._wanted.level)
        return stopped

    def on_end(self, request: Request) -> None:
        """`request` has ended. Under the loop's lock; costs next to nothing."""
        wanted = self._wanted
        if wanted.level is None and wanted.files is None:
            return
        if len(self._queue) >= MOST_WAITING:
            self.dropped += 1
            return
        with self._wake:
            self._queue.append((request, wanted))
            self._wake.notify_all()
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="tokenspeed_rl-requests", daemon=True)
            with suppress(RuntimeError):  # none is to be had now: the next sample that ends tries again
                thread.start()
                self._thread = thread

    def settle(self, timeout: float) -> bool:
        """Whether all that has ended so far is written, after at most so many seconds."""
        with self._wake:
            return self._wake.wait_for(lambda: self._idle and not self._queue, timeout)

    def close(self) -> None:
        """Write what waits, within a bounded time, and end."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)

    def snapshot(self) -> dict[str, Any]:
        """What came of it so far."""
        return {"dumped": self.written, "dropped": self.dropped, "dump_error": self.trouble}

    # Its own thread

    def _run(self) -> None:
        files: DumpFiles | None = None
        while (entry := self._next()) is not None:
            request, wanted = entry
            if files is not wanted.files and files is not None:
                files.close()
            files = wanted.files
            if files is not None and files.error is None:
                self._dump(request, files)
            if wanted.level is not None:
                self._lines.info("%s", self._made(partial(describe, request, wanted.level)))
            del request, wanted, entry  # while nothing comes, nothing is held
        if files is not None:
            files.close()

    def _made(self, make: Callable[[Any], R]) -> R:
        """Without text, where the user's tokenizer can't decode it."""
        try:
            return make(self._tokenizer())
        except Exception:
            return make(None)

    def _next(self) -> tuple[Request, _Wanted] | None:
        with self._wake:
            self._idle = True
            self._wake.notify_all()
            while not self._queue:
                if self._closing:
                    return None
                self._wake.wait()
            self._idle = False
            return self._queue.popleft()

    def _dump(self, request: Request, files: DumpFiles) -> None:
        try:
            line = json.dumps(self._made(partial(record, request))) + "\n"
            files.write(line.encode())
            self.written += 1
        except Exception as error:
            files.error = f"the dump to {files.folder} stopped: {type(error).__name__}: {error}"
            self.trouble = files.error
            self._stopped(files)
            self._log.error(files.error)
