"""Pause and resume, release and resume of memory, as an engine's blocking verbs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tokenspeed_rl.client_control import ControlMembers, Tags
from tokenspeed_rl.errors import EngineShutdownError, EngineStateError, TokenSpeedError
from tokenspeed_rl.llm import LLM
from tokenspeed_rl.requests import ResumeMemoryOccupationReqInput


class ControlVerbs:
    """`ControlMembers`, blocking. Where the client answers False, these raise the reason."""

    client: ControlMembers
    llm: LLM

    def pause(self, mode: str = "abort", *, timeout: float | None = None) -> bool:
        """Stop admission: "abort" ends what is in flight, "wait" runs it to its end, "keep" freezes it,
        "retract" returns it to the queue. New requests wait.

        Args:
            mode: one of those.
            timeout: seconds, after which a pause that still waits is withdrawn.

        Returns:
            True; False when `resume` of another thread came before a waiting pause had ended.

        Raises:
            RequestError: unknown mode. EngineStateError: a drain is going on. EngineTimeoutError. Nothing
                changed.
        """
        before = self.client.pause_mode
        try:
            return self.llm.run(self.client.pause(mode, timeout))
        except TokenSpeedError:
            raise
        except BaseException:  # an interrupt, perhaps just as it was answered
            self._surely(lambda: self.llm.run(self.client.restore_pause(before)))
            raise

    def resume(self) -> bool:
        """Lift a pause, withdraw a pending drain; nothing to do on a running engine."""
        return self.llm.run(self.client.resume_scheduler())

    def is_paused(self) -> bool:
        """Whether admission is paused. At once, whatever else goes on."""
        return self.client.paused

    @contextmanager
    def paused(self, mode: str = "abort") -> Iterator[None]:
        """Within, paused with `mode`; then as before, also after an exception. Raises as `pause`."""
        before = self.client.pause_mode
        if not self.pause(mode):
            raise EngineStateError("the pause was withdrawn by a resume", fix="Pause again.")
        with self._afterwards(lambda: self.llm.run(self.client.restore_pause(before))):
            yield

    def release_memory_occupation(self, tags: Tags = None, *, timeout: float | None = None) -> None:
        """Give memory back: "weights", "kv_cache", "cuda_graph", several, or None: all that is resident.

        A running engine first runs what is in flight to its end; `timeout` seconds later the release is
        withdrawn. Requests that come meanwhile and after wait for the wake.

        Raises:
            RequestError: unknown tags. EngineStateError: one is released already, or a drain or a weight
                update is going on. EngineTimeoutError. Nothing changed.
            OutOfMemoryError: no host memory for the backup; nothing changed.
        """
        self.llm.run(self.client.release(tags, timeout))

    def resume_memory_occupation(self, tags: Tags = None) -> None:
        """Take memory again; None: all that sleeps.

        Raises:
            RequestError: unknown tags. EngineStateError: one is resident already. OutOfMemoryError: not all
                of it is to be had. WeightsInvalidError: a shared module's parameters have moved. Nothing
                changed.
        """
        obj = ResumeMemoryOccupationReqInput(tags=tags)
        self.llm.run(self.client.resume_memory_occupation(obj))

    def is_sleeping(self) -> bool:
        """Whether any memory is released. At once, whatever else goes on."""
        return self.client.sleeping

    def memory_report(self) -> dict[str, Any]:
        """See `AsyncLLM.memory_report`. At once, whatever else goes on."""
        return self.client.memory_report()

    @contextmanager
    def resident(self, *tags: str) -> Iterator[None]:
        """Within, the memory of `tags` (none: all) is there; then what slept before sleeps again, also after
        an exception."""
        self.client.check_alive()
        woken = self.client.asleep(*tags)
        if woken:
            self.resume_memory_occupation(woken)

        def sleep_again() -> None:
            if again := [tag for tag in woken if tag not in self.client.asleep()]:
                self.release_memory_occupation(again)

        with self._afterwards(sleep_again):
            yield

    @contextmanager
    def _afterwards(self, restore: Callable[[], object]) -> Iterator[None]:
        """Restore at the end; where that is refused, an exception of the body's goes first, with a note."""
        try:
            yield
        except BaseException as error:
            try:
                self._surely(restore)
            except TokenSpeedError as refusal:
                error.add_note(f"The engine's state could not be restored: {refusal}")
            raise
        with suppress(EngineShutdownError):  # nothing is left to be restored
            self._surely(restore)

    @staticmethod
    def _surely(restore: Callable[[], object]) -> None:
        """Restore, also when interrupted in the midst of it."""
        try:
            restore()
        except (KeyboardInterrupt, SystemExit):
            restore()
            raise
