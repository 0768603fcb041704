"""AsyncLLM: the engine's protocol on asyncio. It carries requests and commands to the loop, and results
back."""

import asyncio
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tokenspeed_rl.config import EngineConfig, from_overrides
from tokenspeed_rl.core.engine_core import EngineCore
from tokenspeed_rl.errors import ConfigError, EngineStateError, RequestError
from tokenspeed_rl.generate_stream import GenerateStream, Progress
from tokenspeed_rl.protocol import EngineClient
from tokenspeed_rl.requests import (
    EmbeddingReqInput,
    FlushCacheReqOutput,
    GenerateReqInput,
    GetLoadReqOutput,
    GetWeightsByNameReqInput,
)
from tokenspeed_rl.sampling_params import check_integer, check_timeout
from tokenspeed_rl.unavailable import UnavailableMembers
from tokenspeed_rl.weights.receipt import Receipt

R = TypeVar("R")


class AsyncLLM(UnavailableMembers, EngineClient):
    """An engine, for callers on any number of event loops and threads.

    Args:
        model: a Hugging Face directory or hub id (safetensors), a transformers config (seeded random
            weights), or a live transformers causal LM, whose parameters are then shared, not copied.
        tokenizer: a transformers tokenizer; None takes the one in the model's directory, if there is one.
        config: settings; `overrides` are `EngineConfig` fields that win over it.
        process_group: reserved for tensor parallelism; only None in this version.

    Raises:
        ConfigError, WeightUpdateError: this engine can't be built; a live model is left as it was.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        process_group: Any = None,
        **overrides: Any,
    ) -> None:
        self._status = "starting"
        if process_group is not None:
            raise ConfigError(
                "process_group is for tensor parallelism, which this version lacks", fix="Leave it out."
            )
        self.server_args = from_overrides(config, overrides)
        self._core = EngineCore(model, self.server_args, tokenizer)
        source = self._core.source
        self.model_config = source.hf_config
        self.tokenizer = source.tokenizer
        self.model_path = source.path
        self.served_model_name = (
            self.server_args.served_model_name or self.model_path.rstrip("/").rpartition("/")[2]
        )
        self.is_generation = True
        self.is_image_gen = False
        self._finalizer = weakref.finalize(self, self._core.shutdown)
        self._status = "up"

    # Requests

    def generate_request(self, obj: GenerateReqInput | EmbeddingReqInput) -> GenerateStream:
        """Submit `obj` now and return its results, as `EngineClient.generate_request` says."""
        return self.submit(obj)

    def submit(
        self, obj: GenerateReqInput | EmbeddingReqInput, *, on_finish: Callable[[], object] | None = None
    ) -> GenerateStream:
        """`generate_request`, with a witness.

        A list of prompts is submitted as a whole: no step runs between its first and its last. While its
        consumer waits, `on_finish` is called on its event loop as each sample ends.
        """
        if isinstance(obj, EmbeddingReqInput):
            raise self.lacking("embeddings and scores")
        if not isinstance(obj, GenerateReqInput):
            raise RequestError("a request must be a GenerateReqInput", got=obj, fix="Pass that struct.")
        core = self._core
        self.check_alive()
        if self._status == "unhealthy":
            raise EngineStateError(
                "the engine was marked unhealthy", fix="Call mark_server_up() when it is not."
            )
        core.source.check_shared()
        progress = Progress(eager=obj.stream or on_finish is not None)
        requests = core.intake.prepare(obj, capacity=core.capacity(), publish=progress.publish)
        return GenerateStream(
            core.loop,
            requests,
            progress,
            self.tokenizer,
            stream=obj.stream,
            as_list=obj.is_batch,
            on_finish=on_finish,
            owner=self,
        )

    async def generate(
        self,
        obj: GenerateReqInput | EmbeddingReqInput,
        *,
        timeout: float | None = None,
    ) -> Any:
        """The final result of `obj`, also of a streaming one.

        Raises:
            EngineTimeoutError: not done after `timeout` seconds; its requests were aborted.
        """
        check_timeout(timeout)
        return await self.submit(without_stream(obj)).result(timeout)

    def abort_request(self, rid: str) -> None:
        """End every sample of `rid` now, with what it has; unknown or finished: no-op."""
        self._core.loop.abort([_checked_rid(rid)])

    def abort_all(self) -> None:
        """End everything that is queued or running, with what it has."""
        self._core.loop.abort(None)

    def drop_request_state(self, rid: str) -> None:
        """Abort `rid` if it is live; nothing is kept about a finished one."""
        self.check_alive()
        self._core.loop.abort([_checked_rid(rid)])

    async def flush_cache(self) -> FlushCacheReqOutput:
        """Forget all cached prefixes; pages of live requests return when those end."""
        await self._command(self._core.cache.flush)
        return FlushCacheReqOutput(success=True, message="the prefix cache is empty")

    # Weights

    async def share_weights(self, module: nn.Module, version: str | None = None) -> Receipt:
        """Read the weights of the live `module` from now on (same architecture); requests in flight
        re-prefill.

        Raises:
            ConfigError: the module can't be shared, by name; module and engine are as before.
        """
        _check_label(version)
        core = self._core
        return await self._command(
            lambda: core.change_weights(lambda: core.source.share(module, version).receipt)
        )

    async def weights_changed(self, version: str | None = None) -> Receipt:
        """Tell the engine that the trainer wrote the shared weights in place: a complete update of 0 bytes.

        Raises:
            EngineStateError: nothing is shared. WeightsInvalidError, ConfigError: what is shared doesn't hold
                any more; the weights are invalid until `share_weights`.
        """
        _check_label(version)
        core = self._core

        def change() -> Receipt:
            if core.source.shared is None:
                raise EngineStateError(
                    "no module is shared with this engine", fix="Call share_weights(module) first."
                )
            return core.source.shared.weights_changed(version)

        return await self._command(lambda: core.change_weights(change))

    async def get_weights_by_name(self, obj: GetWeightsByNameReqInput) -> Any:
        """The first `truncate_size` rows of a parameter by its Hugging Face name, as nested lists of
        floats. Fused names, tied names and wrappers' prefixes are understood."""
        rows = check_integer("truncate_size", obj.truncate_size, low=0)

        def read() -> Any:
            self.require_runnable()
            store = self._core.source.store
            target = store.names.resolve(obj.name) if isinstance(obj.name, str) else None
            if target is None:
                raise RequestError(
                    "no such parameter", got=obj.name, fix="Names are those of the Hugging Face model."
                )
            return torch.cat([part[:rows] for part in store.parts(target)])[:rows].float().tolist()

        return await self._command(read)

    async def weights_checksum(self) -> str:
        """Digest of the weights, as `tokenspeed_rl.weights.checksum` gives it for the same tensors."""
        self.require_runnable()
        return await self._command(self._core.source.store.checksum)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) of every weight, ties once: the live weights themselves."""
        self.require_runnable()
        return self._core.source.store.parameters()

    def require_runnable(self) -> None:
        """Raise what would keep a request waiting now, `WeightsInvalidError`, or that the engine ended."""
        self.check_alive()
        self._core.source.store.version.require_valid()

    # State

    @property
    def last_receive_tstamp(self) -> float:
        """Epoch seconds of the last drawn token; 0.0 before."""
        return self._core.loop.stats.last_output

    @property
    def gracefully_exit(self) -> bool:
        """True once shutdown has begun."""
        return self._core.loop.closing

    def is_server_starting(self) -> bool:
        """Whether the constructor still runs."""
        return self._status == "starting"

    def mark_server_up(self) -> None:
        """Accept requests (again)."""
        self.check_alive()
        self._status = "up"

    def mark_server_unhealthy(self) -> None:
        """Refuse new requests until `mark_server_up`."""
        self.check_alive()
        self._status = "unhealthy"

    @property
    def paused(self) -> bool:
        """Whether admission is paused: never, in this version."""
        return False

    @property
    def sleeping(self) -> bool:
        """Whether any memory is released: never, in this version."""
        return False

    async def is_scheduler_paused(self) -> bool:
        """`paused`, also after shutdown."""
        return self.paused

    async def is_sleeping(self) -> bool:
        """`sleeping`, also after shutdown."""
        return self.sleeping

    def load(self) -> list[GetLoadReqOutput]:
        """Unfinished samples, how many of them are not running, and pages in use."""
        self.check_alive()
        core = self._core
        live, running = core.loop.num_live, len(core.scheduler.running)
        pages = core.cache.pool.num_used - core.cache.num_idle
        return [
            GetLoadReqOutput(
                dp_rank=0, num_reqs=live, num_waiting_reqs=max(0, live - running), num_pages=pages
            )
        ]

    async def get_load(self) -> list[GetLoadReqOutput]:
        """`load`."""
        return self.load()

    def internal_state(self) -> list[dict[Any, Any]]:
        """Settings, the three axes of state, queues, cache and totals, as of now."""
        self.check_alive()
        state = self._core.snapshot()
        return [
            {
                "server_args": dataclasses.asdict(self.server_args),
                "status": self._status,
                "last_refusal": "" if self.refusal is None else str(self.refusal),
                **state,
            }
        ]

    async def get_internal_state(self) -> list[dict[Any, Any]]:
        """`internal_state`."""
        return self.internal_state()

    def check_alive(self) -> None:
        """Raises EngineShutdownError or EngineDeadError once the engine has ended."""
        self._core.loop.check_alive()

    # End

    def shutdown(self) -> None:
        """End the loop after the running step and free everything of the engine's own. From any thread;
        idempotent.

        Whoever waits gets EngineShutdownError. Shared weights stay the module's.
        """
        self._finalizer.detach()
        self._core.shutdown()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    async def _command(self, command: Callable[[], R]) -> R:
        """Run `command` on the loop's thread between two steps."""
        return await asyncio.wrap_future(self._core.loop.call(command))


def without_stream(obj: Any) -> Any:
    """The request, asking for its whole result at once."""
    return dataclasses.replace(obj, stream=False) if isinstance(obj, GenerateReqInput) and obj.stream else obj


def _checked_rid(rid: str) -> str:
    if not isinstance(rid, str):
        raise RequestError("rid must be a string", got=rid, fix="Abort one request at a time, or all.")
    return rid


def _check_label(version: str | None) -> None:
    if version is not None and not (isinstance(version, str) and version):
        raise RequestError(
            "version must be a non-empty string", got=version, fix="None numbers the versions."
        )
