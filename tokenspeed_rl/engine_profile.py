"""Profiles of the engine's steps, as blocking verbs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenspeed_rl.client_profile import ProfileMembers
from tokenspeed_rl.llm import LLM


class ProfileVerbs:
    """`ProfileMembers`, blocking."""

    client: ProfileMembers
    llm: LLM

    def start_profile(
        self,
        output_dir: str | None = None,
        start_step: int | None = None,
        num_steps: int | None = None,
        activities: Sequence[str] | None = None,
        with_stack: bool | None = None,
        record_shapes: bool | None = None,
        profile_by_stage: bool = False,
    ) -> dict[str, Any]:
        """See `AsyncLLM.start_profile`."""
        begun: dict[str, Any] = self.llm.run(
            self.client.start_profile(
                output_dir, start_step, num_steps, activities, with_stack, record_shapes, profile_by_stage
            )
        )
        return begun

    def stop_profile(self) -> list[str]:
        """See `AsyncLLM.stop_profile`."""
        paths: list[str] = self.llm.run(self.client.stop_profile())
        return paths
