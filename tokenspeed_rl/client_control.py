"""Pause and resume, release and resume of memory, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from tokenspeed_rl.client_base import ClientBase, expect
from tokenspeed_rl.errors import EngineStateError, EngineTimeoutError, TokenSpeedError
from tokenspeed_rl.requests import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput
from tokenspeed_rl.sampling_params import check_timeout

R = TypeVar("R")
Tags = str | Sequence[str] | None


class ControlMembers(ClientBase):
    """Admission and residency, two axes that never change each other."""

    async def pause(self, mode: str = "abort", timeout: float | None = None) -> bool:
        """As `pause_scheduler`, but a refusal raises. After `timeout` seconds a pause that still waits is
        withdrawn.

        Raises:
            RequestError: unknown mode. EngineStateError: a drain is going on. EngineTimeoutError. Nothing
                changed.
        """
        self.check_outside("pause")
        check_timeout(timeout)
        core = self._core
        reply = core.loop.open(partial(core.life.pause, mode))
        try:
            return await _answered(reply, timeout)
        except (asyncio.CancelledError, GeneratorExit):
            core.life.admission.withdraw(reply)  # answered or not: nobody hears it
            with suppress(TokenSpeedError):
                core.loop.call(core.life.settle)
            raise

    async def pause_scheduler(self, *, mode: str = "abort") -> bool:
        """Stop admission and settle what is in flight as `mode` says, see `EngineClient`. Cancelled before
        its answer, it is withdrawn."""
        try:
            if await self.pause(mode):
                return True
            raise EngineStateError("the pause was withdrawn by a resume", fix="Pause again.")
        except TokenSpeedError as error:
            self._refused(error)
            return False

    async def resume_scheduler(self) -> bool:
        """Lift a pause and withdraw a pending drain; True, also on a running engine."""
        return await self._command(self._core.life.resume)

    async def restore_pause(self, mode: str | None) -> None:
        """Be paused with `mode` again, or running, without acting on any request."""
        await self._command(partial(self._core.life.resume, mode))

    async def release(self, tags: Tags = None, timeout: float | None = None) -> None:
        """As `release_memory_occupation`; not drained after `timeout` seconds, nothing is released."""
        self.check_outside("release_memory_occupation")
        check_timeout(timeout)
        core = self._core
        await _answered(core.loop.open(partial(core.life.release, tags)), timeout)

    async def release_memory_occupation(self, obj: ReleaseMemoryOccupationReqInput) -> None:
        """Give memory back to its owner; on return it is there. A running engine drains first; cancelled
        before that ended, nothing is released."""
        await self.release(expect(obj, ReleaseMemoryOccupationReqInput).tags)

    async def resume_memory_occupation(self, obj: ResumeMemoryOccupationReqInput) -> None:
        """Take memory again, at the addresses it had: all that is asked for, or nothing and
        OutOfMemoryError."""
        self.check_outside("resume_memory_occupation")
        tags = expect(obj, ResumeMemoryOccupationReqInput).tags
        await self._command(partial(self._core.life.wake, tags))

    @property
    def pause_mode(self) -> str | None:
        """The mode of the pause; None on a running engine."""
        return self._core.life.admission.mode

    @property
    def paused(self) -> bool:
        """Whether admission is paused."""
        return self.pause_mode is not None

    @property
    def sleeping(self) -> bool:
        """Whether any memory is released."""
        return self._core.life.residency.asleep

    async def is_scheduler_paused(self) -> bool:
        """`paused`, also after shutdown."""
        return self.paused

    async def is_sleeping(self) -> bool:
        """`sleeping`, also after shutdown."""
        return self.sleeping

    def asleep(self, *tags: str) -> tuple[str, ...]:
        """Those of `tags` (none named: of all) that are released."""
        return self._core.life.residency.sleeping(tags)

    def memory_report(self) -> dict[str, Any]:
        """Per tag: bytes `mapped`, `virtual` (reserved addresses) and `host` (backups), and the `owner`,
        "engine" or "trainer"; and as "untagged" the bytes of the engine's that no release gives back.

        The KV cache is mapped at the first request, sized by `max_total_tokens` or `mem_fraction`; on the CPU
        a page of it takes memory when it is first written.
        """
        self.check_alive()
        return self._core.memory_report()


async def _answered(reply: Future[R], timeout: float | None) -> R:
    """The answer. Not begun, or still draining, when this is cancelled or after `timeout` seconds: withdrawn.

    Raises:
        EngineTimeoutError: that happened; else there is an answer, however late.
    """
    answer = asyncio.wrap_future(reply)
    try:
        await asyncio.wait([answer], timeout=timeout)
    except BaseException:
        answer.cancel()
        reply.cancel()
        raise
    if reply.cancel():
        raise EngineTimeoutError(
            f"requests still ran after {timeout:g} s, and the call that waits for their end was withdrawn",
            fix="Allow more time, or abort them first.",
        )
    return await answer
