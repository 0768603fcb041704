"""An engine's own logger."""

import logging
from contextlib import suppress


class EngineLog(logging.Logger):
    """Messages of one engine, for the handlers of the `tokenspeed_rl` logger and those above it.

    It is not in logging's registry, which would keep it for ever; so nothing caches what is enabled, and a
    new level counts at once.
    """

    def __init__(self, name: str, level: str) -> None:
        """`level` is a name in any case."""
        super().__init__(name, level.upper())
        self.parent = logging.getLogger("tokenspeed_rl")

    def isEnabledFor(self, level: int) -> bool:
        """Whether a message of that level goes out now."""
        return not self.disabled and self.manager.disable < level >= self.level

    def callHandlers(self, record: logging.LogRecord) -> None:
        """As a logger's. A handler of the user's that raises doesn't end one of the engine's threads, nor
        keep one from telling who waits."""
        with suppress(Exception):
            super().callHandlers(record)
