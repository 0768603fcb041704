"""A thread of the soak: one call after another until it is told to stop."""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod

from tests.soak.world import World


class Worker(ABC):
    """What its n-th call is follows from the seed, its name and n alone."""

    pace = 0.0
    """Seconds between two calls, on average."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.journal = world.journal
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(self, seconds: float) -> bool:
        """Whether it ended within so many seconds."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @abstractmethod
    def call(self, number: int, rng: random.Random) -> None:
        """Make the call of this number."""

    def _run(self) -> None:
        number = 0
        while not self.journal.stop.is_set():
            number += 1
            rng = random.Random(f"{self.world.seed}/{self.name}/{number}")
            try:
                self.call(number, rng)
            except BaseException as error:
                self.journal.crashed(self.name, error)
                return
            if self.pace:
                self.journal.stop.wait(rng.expovariate(1 / self.pace))
