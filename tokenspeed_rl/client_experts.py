"""The record of expert distribution, for asyncio."""

from __future__ import annotations

from tokenspeed_rl.client_base import ClientBase


class ExpertMembers(ClientBase):
    """How tokens spread over the experts: per layer and expert, of the last steps and in total.

    The record and the last dump are `get_internal_state()[0]["expert_distribution"]`.
    """

    async def start_expert_distribution_record(self) -> None:
        """Count from the next step on.

        Raises:
            EngineStateError: it is on, or the model has no experts.
        """
        await self._command(self._core.experts.start)

    async def stop_expert_distribution_record(self) -> None:
        """Count no more; what was counted stays until it is dumped, and another start goes on with it.

        Raises:
            EngineStateError: it is off, or the model has no experts.
        """
        await self._command(self._core.experts.stop)

    async def dump_expert_distribution_record(self) -> None:
        """Take the record away and begin another, whether recording is on or off: it becomes the last dump,
        and a JSON file (mode 0600) in `EngineConfig.expert_distribution_dir`, if that is set.

        Raises:
            EngineStateError: nothing was counted, the model has no experts, or the file can't be written; the
                record stays.
        """
        await self._command(self._core.experts.dump)
