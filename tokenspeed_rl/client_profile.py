"""Profiles of the engine's steps, for asyncio."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tokenspeed_rl.client_base import ClientBase
from tokenspeed_rl.core.watching.profiler import profile_request


class ProfileMembers(ClientBase):
    """One profile at a time in a process: torch's profiler is the process's."""

    async def start_profile(
        self,
        output_dir: str | None = None,
        start_step: int | None = None,
        num_steps: int | None = None,
        activities: Sequence[str] | None = None,
        with_stack: bool | None = None,
        record_shapes: bool | None = None,
        profile_by_stage: bool = False,
    ) -> Any:
        """Record steps of the engine with torch's profiler, from its own thread, as a Chrome trace, which
        chrome://tracing and ui.perfetto.dev show. Each step is marked `prefill[3 requests, 120 tokens]` or
        `decode[8]`. While it runs, start no other profiler in this process: torch would break both.

        Args:
            output_dir: where <time>-rank0[-prefill | -decode].trace.json goes; made if need be; None:
                "profiles" in the working directory.
            start_step: begin with the step that is taken when `get_internal_state()[0]["steps"]` says so
                much: that many steps are over then. None: with the next one.
            num_steps: end by itself after so many, and write; None: at `stop_profile`, or at `shutdown`.
            activities: of "CPU" and "GPU" (also called "CUDA"); None: what can be recorded here.
            with_stack: record Python's stacks too, of all threads.
            record_shapes: record the shapes of operators' inputs.
            profile_by_stage: one trace of the steps that compute any prompt (prefill) and one of those that
                only decode; `num_steps` of each.

        Returns:
            What was begun, a dict: output_dir, start_step, num_steps, activities, profile_by_stage.

        Raises:
            RequestError: a bad argument, or a folder that can't be written. EngineStateError: a profile is
                going on, of this engine or of anybody in the process, who keeps it. Nothing was started.
        """
        self.check_alive()
        asked = profile_request(
            output_dir, start_step, num_steps, activities, with_stack, record_shapes, profile_by_stage
        )
        return await self._command(partial(self._core.watch.profiler.start, asked))

    async def stop_profile(self) -> Any:
        """End the profile and write it; the list of its traces' paths, empty if no step was taken in it.

        Of a profile that ended by itself the first call returns the paths too.

        Raises:
            EngineStateError: there is no profile, or it failed (a full disk, another profiler).
        """
        return await self._command(self._core.watch.profiler.stop)
