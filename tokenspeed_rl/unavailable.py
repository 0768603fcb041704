"""Members of the contract that this version lacks: each refuses with its reason, none pretends."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from tokenspeed_rl.core.engine_core import EngineCore
from tokenspeed_rl.errors import TokenSpeedError, UnavailableError
from tokenspeed_rl.requests import (
    CloseSessionReqInput,
    ConfigureLoggingReq,
    DestroyWeightsUpdateGroupReqInput,
    InitWeightsUpdateGroupReqInput,
    OpenSessionReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    SetInternalStateReq,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
)


class Reply(tuple[Any, ...]):
    """A tuple that unpacks to exactly its items and carries the report of the call as `.report`."""

    report: Any

    def __new__(cls, items: tuple[Any, ...], report: Any = None) -> "Reply":
        """`items` with `report` beside them."""
        reply = super().__new__(cls, items)
        reply.report = report
        return reply


def unavailable(member: str) -> UnavailableError:
    """The error of a member of the contract that this version lacks."""
    return UnavailableError(
        f"{member} is not available in this version; the README's support table lists what is"
    )


class UnavailableMembers:
    """What can answer, answers with a refusal and its reason; what can only return None raises."""

    refusal: TokenSpeedError | None = None
    """Why the last call that was refused was."""

    _core: EngineCore

    def lacking(self, member: str) -> UnavailableError:
        """The error of a member that this version lacks, for as long as the engine lives."""
        self._core.loop.check_alive()
        return unavailable(member)

    async def pause_scheduler(self, *, mode: str = "abort") -> bool:
        """Refused: see `get_internal_state()[0]["last_refusal"]`."""
        return bool(self._refusal("pause_scheduler")[0])

    async def resume_scheduler(self) -> bool:
        """True: nothing is ever paused."""
        self._core.loop.check_alive()
        return True

    async def set_internal_state(self, obj: SetInternalStateReq) -> list[bool]:
        """Refused: see `get_internal_state()[0]["last_refusal"]`."""
        return [bool(self._refusal("set_internal_state")[0])]

    async def update_weights_from_disk(self, obj: UpdateWeightFromDiskReqInput) -> tuple[bool, str, Any]:
        """Refused: nothing is written."""
        reply: tuple[bool, str, Any] = self._refusal("update_weights_from_disk", 0)
        return reply

    async def init_weights_update_group(self, obj: InitWeightsUpdateGroupReqInput) -> tuple[bool, str]:
        """Refused."""
        reply: tuple[bool, str] = self._refusal("init_weights_update_group")
        return reply

    async def destroy_weights_update_group(self, obj: DestroyWeightsUpdateGroupReqInput) -> tuple[bool, str]:
        """Refused."""
        reply: tuple[bool, str] = self._refusal("destroy_weights_update_group")
        return reply

    async def update_weights_from_distributed(
        self, obj: UpdateWeightsFromDistributedReqInput
    ) -> tuple[bool, str]:
        """Refused: nothing is written."""
        reply: tuple[bool, str] = self._refusal("update_weights_from_distributed")
        return reply

    async def update_weights_from_tensor(self, obj: UpdateWeightsFromTensorReqInput) -> tuple[bool, str]:
        """Refused: nothing is written."""
        reply: tuple[bool, str] = self._refusal("update_weights_from_tensor")
        return reply

    async def open_session(self, obj: OpenSessionReqInput) -> str | None:
        """Raises UnavailableError."""
        raise self.lacking("open_session")

    async def close_session(self, obj: CloseSessionReqInput) -> None:
        """Raises UnavailableError."""
        raise self.lacking("close_session")

    def configure_logging(self, obj: ConfigureLoggingReq) -> None:
        """Raises UnavailableError."""
        raise self.lacking("configure_logging")

    async def release_memory_occupation(self, obj: ReleaseMemoryOccupationReqInput) -> None:
        """Raises UnavailableError."""
        raise self.lacking("release_memory_occupation")

    async def resume_memory_occupation(self, obj: ResumeMemoryOccupationReqInput) -> None:
        """Raises UnavailableError."""
        raise self.lacking("resume_memory_occupation")

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

    async def start_expert_distribution_record(self) -> None:
        """Raises UnavailableError."""
        raise self.lacking("start_expert_distribution_record")

    async def stop_expert_distribution_record(self) -> None:
        """Raises UnavailableError."""
        raise self.lacking("stop_expert_distribution_record")

    async def dump_expert_distribution_record(self) -> None:
        """Raises UnavailableError."""
        raise self.lacking("dump_expert_distribution_record")

    def _refusal(self, member: str, *rest: Any) -> Any:  # a Reply: no tuple of fixed length to type checkers
        error = self.lacking(member)
        self.refusal = error
        return Reply((False, str(error), *rest), report=error)


class UnavailableVerbs:
    """The same members as an engine's blocking verbs."""

    client: UnavailableMembers

    def encode(self, prompt: str | Sequence[str] | None = None, *, input_ids: Any = None) -> Any:
        """Raises UnavailableError."""
        raise self.client.lacking("encode")

    def update_weights_from_tensor(self, named_tensors: Any, **fields: Any) -> Any:
        """Raises UnavailableError."""
        raise self.client.lacking("update_weights_from_tensor")

    def update_weights_from_distributed(
        self, names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]], **fields: Any
    ) -> Any:
        """Raises UnavailableError."""
        raise self.client.lacking("update_weights_from_distributed")

    def update_weights_from_disk(self, path: str, **fields: Any) -> Any:
        """Raises UnavailableError."""
        raise self.client.lacking("update_weights_from_disk")

    def init_weights_update_group(self, **fields: Any) -> Any:
        """Raises UnavailableError."""
        raise self.client.lacking("init_weights_update_group")

    def destroy_weights_update_group(self, group_name: str) -> Any:
        """Raises UnavailableError."""
        raise self.client.lacking("destroy_weights_update_group")

    def set_internal_state(self, **fields: Any) -> list[bool]:
        """Raises UnavailableError."""
        raise self.client.lacking("set_internal_state")

    def pause(self, mode: str = "abort") -> bool:
        """Raises UnavailableError."""
        raise self.client.lacking("pause")

    def release_memory_occupation(self, tags: str | Sequence[str] | None = None) -> None:
        """Raises UnavailableError."""
        raise self.client.lacking("release_memory_occupation")

    def resume_memory_occupation(self, tags: str | Sequence[str] | None = None) -> None:
        """Raises UnavailableError."""
        raise self.client.lacking("resume_memory_occupation")

    def memory_report(self) -> dict[str, Any]:
        """Raises UnavailableError."""
        raise self.client.lacking("memory_report")

    def paused(self, mode: str = "abort") -> AbstractContextManager[None]:
        """Raises UnavailableError."""
        raise self.client.lacking("paused")

    def resident(self, *tags: str) -> AbstractContextManager[None]:
        """Raises UnavailableError."""
        raise self.client.lacking("resident")

    def open_session(self, capacity_of_str_len: int, session_id: str | None = None) -> str | None:
        """Raises UnavailableError."""
        raise self.client.lacking("open_session")

    def close_session(self, session_id: str) -> None:
        """Raises UnavailableError."""
        raise self.client.lacking("close_session")

    def start_profile(self, **fields: Any) -> Any:
        """Raises UnavailableError."""
        raise self.client.lacking("start_profile")

    def stop_profile(self) -> Any:
        """Raises UnavailableError."""
        raise self.client.lacking("stop_profile")

    def start_expert_distribution_record(self) -> None:
        """Raises UnavailableError."""
        raise self.client.lacking("start_expert_distribution_record")

    def stop_expert_distribution_record(self) -> None:
        """Raises UnavailableError."""
        raise self.client.lacking("stop_expert_distribution_record")

    def dump_expert_distribution_record(self) -> None:
        """Raises UnavailableError."""
        raise self.client.lacking("dump_expert_distribution_record")
