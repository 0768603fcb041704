"""What is seen of an engine from outside: counts, request logs, profiles, a watchdog; what can be tuned."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from tokenspeed_rl.config import EngineConfig
from tokenspeed_rl.core.engine_loop import EngineLoop
from tokenspeed_rl.core.request import Request
from tokenspeed_rl.core.scheduler import Scheduler
from tokenspeed_rl.core.stats import Ends
from tokenspeed_rl.core.watching.dump_files import DumpFiles, prepare_folder
from tokenspeed_rl.core.watching.profiler import Profiler
from tokenspeed_rl.core.watching.request_log import RequestLog
from tokenspeed_rl.core.watching.tunables import Setter, Tunables
from tokenspeed_rl.core.watching.watch_thread import WatchThread
from tokenspeed_rl.errors import ConfigError, RequestError
from tokenspeed_rl.lifecycle.watchdog import Watchdog
from tokenspeed_rl.weights.version import WeightVersion


class Watch:
    """Made before the loop, which tells it of every step and of every sample that ends.

    Raises:
        ConfigError: the folder for dumps can't be written.
    """

    def __init__(
        self,
        config: EngineConfig,
        log: logging.Logger,
        *,
        tokenizer: Callable[[], Any],
        steps: Callable[[], int],
    ) -> None:
        """`tokenizer` is asked for with the first sample that ends; `steps` were taken so far."""
        self.ends = Ends()
        self.profiler = Profiler(steps)
        self.watchdog = Watchdog(None)
        self._log = log
        self._requests = RequestLog(tokenizer, log, self._stop_dump)
        self._config = config
        self._lock = threading.RLock()  # until there is a loop
        self._thread: WatchThread | None = None
        try:
            folder = config.dump_requests_folder
            self._requests.configure(config, prepare_folder(folder) if folder else None)
        except RequestError as error:
            raise ConfigError(str(error)) from error

    def begin(self, scheduler: Scheduler, version: WeightVersion, loop: EngineLoop) -> Tunables:
        """Begin to watch as the config says; returns what changes that, and the rest that can change."""
        self._lock = loop.lock
        thread = self._thread = WatchThread(self.watchdog, lambda: loop.thread, self._log)
        setters: dict[str, Setter] = {
            "max_running_requests": lambda c: setattr(scheduler, "max_running", c.max_running_requests),
            "chunked_prefill_size": lambda c: setattr(scheduler, "prefill_budget", c.chunked_prefill_size),
            "enable_prefix_caching": lambda c: scheduler.cache.enable(c.enable_prefix_caching),
            "log_level": lambda c: self._log.setLevel(c.log_level.upper()),
            "watchdog_timeout": lambda c: thread.set_timeout(c.watchdog_timeout),
        }
        thread.set_timeout(self._config.watchdog_timeout)
        configure = self._requests.configure
        return Tunables(self._config, setters, logging=configure, rename=version.rename, lock=loop.lock)

    def on_end(self, request: Request) -> None:
        """A sample has ended. Under the loop's lock."""
        self.ends.count(request)
        self._requests.on_end(request)

    def snapshot(self) -> dict[str, Any]:
        """Counts, logs and profile; JSON-serialisable. From any thread."""
        return {
            **self.ends.snapshot(),
            "request_log": self._requests.snapshot(),
            "profile": self.profiler.profiling.snapshot(),
        }

    def close(self) -> None:
        """End its threads; what waits to be written is. The loop has ended."""
        if self._thread is not None:
            self._thread.close()
        self._requests.close()

    def _stop_dump(self, files: DumpFiles) -> None:
        with self._lock:
            if self._requests.stop(files):
                self._config.dump_requests_folder = ""
