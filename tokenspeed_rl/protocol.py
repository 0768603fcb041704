"""EngineClient: the one surface of the engine that trainer-side code may depend on.

Every coroutine may be awaited from any event loop, every plain method called from any thread; the engine's
loop runs them between two steps, in order of arrival. After `shutdown` everything but `abort_request` and
the `is_*` calls raises `EngineShutdownError`, and callers that wait then are woken with it; when the loop
has failed they get `EngineDeadError` with the first cause chained. A tuple result unpacks to exactly the
items shown and may carry `.report`; the reason of a refusal that a `bool` reports is
`get_internal_state()[0]["last_refusal"]`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol, runtime_checkable

from tokenspeed_rl.config import EngineConfig
from tokenspeed_rl.requests import (
    CloseSessionReqInput,
    ConfigureLoggingReq,
    EmbeddingReqInput,
    FlushCacheReqOutput,
    GenerateReqInput,
    GetLoadReqOutput,
    GetWeightsByNameReqInput,
    InitWeightsUpdateGroupReqInput,
    OpenSessionReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    SetInternalStateReq,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
)


@runtime_checkable
class EngineClient(Protocol):
    """What a trainer sees of an engine. `AsyncLLM` implements it; a rollout loop is typed against it."""

    server_args: EngineConfig
    """The engine's settings, after overrides."""
    model_config: Any
    """The transformers config of the model."""
    tokenizer: Any
    """The transformers tokenizer, or None: then prompts are token ids and `text` is ""."""
    model_path: str
    """Directory or hub id of the model; "" for one that was given as an object."""
    served_model_name: str
    is_generation: bool
    """Whether the model generates (else it only embeds or scores)."""
    is_image_gen: bool
    """Always False here."""

    @property
    def last_receive_tstamp(self) -> float:
        """Epoch seconds at which the loop last put out anything; 0.0 before."""
        ...

    @property
    def gracefully_exit(self) -> bool:
        """True once shutdown has begun."""
        ...

    async def generate_request(
        self, obj: GenerateReqInput | EmbeddingReqInput
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Serve one prompt or a list of prompts; waits while paused, asleep or without valid weights.

        Yields one final result (a dict; a list of dicts for a list or `n > 1`), or with `obj.stream` single
        dicts as tokens come. Abandoning or cancelling the iteration aborts the request.

        An `EmbeddingReqInput` gives `{"embedding": list, "meta_info": ...}` from a causal LM and `{"score":
        ..., "meta_info": ...}` from a model that scores, which refuses to generate.

        Raises:
            RequestError: the request is malformed or can never be served; nothing of it was queued.
            EngineStateError: the engine was marked unhealthy, or the session has a live turn.
        """
        yield {}

    def abort_request(self, rid: str) -> None:
        """End every sample of `rid` now, as `abort` with what it has. Unknown or finished: no-op."""

    async def open_session(self, obj: OpenSessionReqInput) -> str | None:
        """Open a multi-turn session and return its id, or None if `obj.session_id` is already open.

        A turn is a request with the id in `session_params`: its prompt is the session's tokens and its input,
        and when it ends by itself the session has its output too.

        Raises:
            RequestError: a capacity or an id that is none.
        """

    async def close_session(self, obj: CloseSessionReqInput) -> None:
        """Close a session and free its tokens; a live turn is aborted.

        Raises:
            RequestError: no such session.
        """

    async def flush_cache(self) -> FlushCacheReqOutput:
        """Drop every prefix that no live request uses and free its pages, after the running step."""

    def configure_logging(self, obj: ConfigureLoggingReq) -> None:
        """Change what is logged or dumped about requests; fields that are None stay as they are.

        Raises:
            RequestError, ConfigError: a level that isn't, or a folder that can't be written; nothing changed.
        """

    async def pause_scheduler(self, *, mode: str = "abort") -> bool:
        """Stop admission and settle what is in flight as `mode` says.

        Args:
            mode: "abort" ends it, "wait" runs it to its end, "keep" freezes it with its KV, "retract" returns
                it to the queue and drops its KV. "abort" and "wait" reply once nothing is left, the others
                at once.

        Returns:
            True; False when it was refused (unknown mode, a drain is going on) and nothing changed, or when a
            resume withdrew it. Cancelled before its answer, it is withdrawn too.
        """
        ...

    async def resume_scheduler(self) -> bool:
        """Lift a pause and withdraw a pending drain. Resuming a running engine is fine."""
        ...

    async def is_scheduler_paused(self) -> bool:
        """Whether admission is paused; answered from a snapshot, also after shutdown."""
        ...

    def is_server_starting(self) -> bool:
        """Whether the engine is not ready for its first request yet."""
        ...

    def mark_server_up(self) -> None:
        """Accept new requests again after `mark_server_unhealthy`; a step that hangs still keeps them out."""

    def mark_server_unhealthy(self) -> None:
        """Refuse new requests with `EngineStateError` until `mark_server_up`; those in flight go on."""

    def drop_request_state(self, rid: str) -> None:
        """Abort `rid` if it is live, then forget everything kept about it."""

    async def update_weights_from_disk(self, obj: UpdateWeightFromDiskReqInput) -> tuple[bool, str, Any]:
        """Replace all weights by those of a safetensors directory: (done, message, requests retracted)."""
        ...

    async def init_weights_update_group(self, obj: InitWeightsUpdateGroupReqInput) -> tuple[bool, str]:
        """Join a sender's weight group as a receiver, within `obj.timeout` seconds: (done, message)."""
        ...

    async def update_weights_from_distributed(
        self, obj: UpdateWeightsFromDistributedReqInput
    ) -> tuple[bool, str]:
        """Receive weights over a group that was joined before: (done, message)."""
        ...

    async def update_weights_from_tensor(self, obj: UpdateWeightsFromTensorReqInput) -> tuple[bool, str]:
        """Copy weights out of tensors of this process, or out of safetensors bytes: (done, message).

        A mapping or list is judged whole before the first write; an iterator as it comes, on the caller's
        thread. From the first write to the commit no step is taken, other calls are served; requests in
        flight re-prefill then, or under a pause that keeps go on with their KV. If it fails after its first
        write the weights are invalid until a complete update, or with `obj.atomic` the old ones.
        """
        ...

    async def get_weights_by_name(self, obj: GetWeightsByNameReqInput) -> Any:
        """The first `obj.truncate_size` rows of a parameter, as nested lists of floats.

        Raises:
            RequestError: no such parameter.
            WeightsInvalidError: the weights are incomplete; `EngineStateError` when they sleep.
        """

    async def release_memory_occupation(self, obj: ReleaseMemoryOccupationReqInput) -> None:
        """Give the memory of the tags back to its owner; a running engine drains first.

        Raises:
            EngineStateError: a tag named is released already, or a drain is going on; nothing changed.
        """

    async def resume_memory_occupation(self, obj: ResumeMemoryOccupationReqInput) -> None:
        """Map the memory of the tags again, at the addresses it had.

        Raises:
            EngineStateError: a tag named is resident already.
            OutOfMemoryError: rolled back whole, can be tried again.
        """

    async def is_sleeping(self) -> bool:
        """Whether any tag is released; answered from a snapshot, also after shutdown."""
        ...

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
        """Profile the engine's steps with torch's profiler, as Chrome traces; returns what was begun.

        Args:
            output_dir: where traces go; None: "profiles" in the working directory.
            start_step: the count of steps taken (`steps` of the internal state) at which to begin; None: now.
            num_steps: how many steps, of each stage if they are told apart; None: until `stop_profile`.
            activities: of "CPU" and "GPU".
            with_stack: record Python stacks.
            record_shapes: record the shapes of operators' inputs.
            profile_by_stage: separate traces for prefill and decode steps.

        Raises:
            RequestError: a bad argument, or a folder that can't be written. EngineStateError: a profile is
                going on, of this engine or of another profiler in the process. Nothing was started.
        """

    async def stop_profile(self) -> Any:
        """End a profile, or learn that it ended by itself; returns the list of its traces' paths.

        Raises:
            EngineStateError: there is none, or it failed.
        """

    async def start_expert_distribution_record(self) -> None:
        """Begin to count the tokens that each expert is sent."""

    async def stop_expert_distribution_record(self) -> None:
        """Stop counting; what was counted stays."""

    async def dump_expert_distribution_record(self) -> None:
        """Write the counts out and reset them."""

    async def get_internal_state(self) -> list[dict[Any, Any]]:
        """One dict per data-parallel rank (here one) that JSON can hold: settings, the three axes of state,
        version, memory, queues, rates, counts, health; from a snapshot, also while a step hangs."""
        ...

    async def set_internal_state(self, obj: SetInternalStateReq) -> list[bool]:
        """Change settings that can change while running, all or none; one answer per data-parallel rank."""
        ...

    async def get_load(self) -> list[GetLoadReqOutput]:
        """The load of each data-parallel rank (here one), from a snapshot."""
        ...
