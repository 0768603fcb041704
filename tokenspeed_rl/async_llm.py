"""AsyncLLM: the engine's protocol on asyncio. It carries requests and commands to the loop, and results
back."""

import asyncio
import dataclasses
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from torch import nn

from tokenspeed_rl.client_control import ControlMembers
from tokenspeed_rl.client_experts import ExpertMembers
from tokenspeed_rl.client_profile import ProfileMembers
from tokenspeed_rl.client_sessions import SessionMembers
from tokenspeed_rl.client_state import StateMembers
from tokenspeed_rl.client_weights import WeightMembers
from tokenspeed_rl.config import EngineConfig, from_overrides
from tokenspeed_rl.core.engine_core import EngineCore
from tokenspeed_rl.errors import ConfigError, RequestError
from tokenspeed_rl.explain import explain
from tokenspeed_rl.explanation import Explanation
from tokenspeed_rl.generate_stream import GenerateStream, Progress
from tokenspeed_rl.protocol import EngineClient
from tokenspeed_rl.requests import (
    EmbeddingReqInput,
    FlushCacheReqOutput,
    GenerateReqInput,
)
from tokenspeed_rl.sampling_params import check_bool, check_timeout

R = TypeVar("R")


class AsyncLLM(
    WeightMembers,
    ControlMembers,
    SessionMembers,
    ExpertMembers,
    StateMembers,
    ProfileMembers,
    EngineClient,
):
    """An engine, for callers on any number of event loops and threads.

    Args:
        model: a Hugging Face directory or hub id (safetensors), a transformers config (seeded random
            weights), or a live transformers model, whose parameters are then shared, not copied: a causal
            LM, plain or with PEFT's LoRA adapters, or a ForSequenceClassification or
            ForTokenClassification, which only scores.
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
        self._mark("starting")
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
        self.is_generation = source.spec.head.generates
        self.is_image_gen = False
        self._finalizer = weakref.finalize(self, self._core.shutdown)
        _end_with_the_interpreter(self._finalizer)
        self._mark("up")

    # Requests

    def generate_request(self, obj: GenerateReqInput | EmbeddingReqInput) -> GenerateStream:
        """Submit `obj` now and return its results, as `EngineClient.generate_request` says."""
        return self.submit(obj)

    def submit(
        self,
        obj: GenerateReqInput | EmbeddingReqInput,
        *,
        wait: bool = True,
        on_finish: Callable[[], object] | None = None,
    ) -> GenerateStream:
        """`generate_request`, with a witness.

        A list of prompts is submitted as a whole: no step runs between its first and its last. While its
        consumer waits, `on_finish` is called on its event loop as each sample ends. Without `wait` what would
        keep it waiting is raised, as `require_runnable` does.
        """
        if not isinstance(obj, GenerateReqInput | EmbeddingReqInput):
            raise RequestError(
                "a request must be a GenerateReqInput or an EmbeddingReqInput",
                got=obj,
                fix="Pass one of those structs.",
            )
        streams = isinstance(obj, GenerateReqInput) and obj.stream
        self.check_outside("generate")
        check_bool("wait", wait)
        core = self._core
        self.check_alive()
        self.check_healthy()
        if not wait:
            self.require_runnable()  # before anything is mapped for it
        core.life.check_shared()
        progress = Progress(eager=streams or on_finish is not None)
        requests = core.intake.prepare(
            obj, capacity=core.capacity(), publish=progress.publish, sessions=core.sessions
        )
        return GenerateStream(
            core.loop,
            requests,
            progress,
            self.tokenizer,
            stream=streams,
            as_list=obj.is_batch,
            on_finish=on_finish,
            check=None if wait else core.life.require_runnable,
            may_wait=partial(core.life.slot.check_outside, "generate"),
            owner=self,
        )

    async def generate(
        self,
        obj: GenerateReqInput | EmbeddingReqInput,
        *,
        timeout: float | None = None,
        wait: bool = True,
    ) -> Any:
        """The final result of `obj`, also of a streaming one; `wait` as for `submit`.

        Raises:
            EngineTimeoutError: not done after `timeout` seconds; its requests were aborted.
        """
        check_timeout(timeout)
        return await self.submit(without_stream(obj), wait=wait).result(timeout)

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

    def require_runnable(self) -> None:
        """Raise what would keep a request waiting now: EngineStateError asleep, paused or about to sleep,
        WeightsInvalidError; or that the engine ended."""
        self.check_alive()
        self._core.life.require_runnable()

    async def flush_cache(self) -> FlushCacheReqOutput:
        """Forget all cached prefixes; pages of live requests return when those end."""
        await self._command(self._core.cache.flush)
        return FlushCacheReqOutput(success=True, message="the prefix cache is empty")

    # State

    @property
    def last_receive_tstamp(self) -> float:
        """Epoch seconds of the last drawn token, embedding or score; 0.0 before."""
        return self._core.loop.stats.last_output

    @property
    def gracefully_exit(self) -> bool:
        """True once shutdown has begun."""
        return self._core.loop.closing

    def explain(
        self,
        output: Mapping[str, Any],
        module: nn.Module,
        temperature: float = 1.0,
        tolerance: float | None = None,
    ) -> Explanation:
        """As `Engine.explain`: it blocks, for as long as the module's forward takes."""
        self.check_alive()
        self.check_outside("explain")
        return explain(
            self._core,
            output,
            module,
            temperature=temperature,
            tolerance=tolerance,
            tokenizer=self.tokenizer,
        )

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


def without_stream(obj: Any) -> Any:
    """The request, asking for its whole result at once."""
    return dataclasses.replace(obj, stream=False) if isinstance(obj, GenerateReqInput) and obj.stream else obj


def _checked_rid(rid: str) -> str:
    if not isinstance(rid, str):
        raise RequestError("rid must be a string", got=rid, fix="Abort one request at a time, or all.")
    return rid


def _end_with_the_interpreter(finalizer: "weakref.finalize[..., AsyncLLM]") -> None:
    """Before it waits for threads that nobody would wake: those that wait in an engine."""
    register = getattr(threading, "_register_atexit", None)  # what the standard library's executors use
    if register is not None:
        with suppress(RuntimeError):  # it ends already
            register(finalizer)
