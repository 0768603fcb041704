"""Members of the contract that this version lacks: each refuses with its reason, none pretends."""

from collections.abc import Sequence
from typing import Any

from tokenspeed_rl.client_base import ClientBase
from tokenspeed_rl.errors import UnavailableError
from tokenspeed_rl.requests import (
    ConfigureLoggingReq,
    SetInternalStateReq,
)


def unavailable(member: str) -> UnavailableError:
    """The error of a member of the contract that this version lacks."""
    return UnavailableError(
        f"{member} is not available in this version; the README's support table lists what is"
    )


class UnavailableMembers(ClientBase):
    """What can answer, answers with a refusal and its reason; what can only return None raises."""

    def lacking(self, member: str) -> UnavailableError:
        """The error of a member that this version lacks, for as long as the engine lives."""
        self.check_alive()
        return unavailable(member)

    async def set_internal_state(self, obj: SetInternalStateReq) -> list[bool]:
        """Refused: see `get_internal_state()[0]["last_refusal"]`."""
        self._refused(self.lacking("set_internal_state"))
        return [False]

    def configure_logging(self, obj: ConfigureLoggingReq) -> None:
        """Raises UnavailableError."""
        raise self.lacking("configure_logging")

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
        """Raises UnavailableError."""
        raise self.lacking("start_profile")

    async def stop_profile(self) -> Any:
        """Raises UnavailableError."""
        raise self.lacking("stop_profile")


class UnavailableVerbs:
    """The same members as an engine's blocking verbs."""

    client: UnavailableMembers

    def set_internal_state(self, **fields: Any) -> list[bool]:
        """Raises UnavailableError."""
        raise self.client.lacking("set_internal_state")

    def start_profile(self, **fields: Any) -> Any:
        """Raises UnavailableError."""
        raise self.client.lacking("start_profile")

    def stop_profile(self) -> Any:
        """Raises UnavailableError."""
        raise self.client.lacking("stop_profile")
