"""Engine: the blocking API that trainer code calls."""

from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from torch import nn

from tokenspeed_rl.async_llm import AsyncLLM
from tokenspeed_rl.client_base import make_request
from tokenspeed_rl.config import EngineConfig
from tokenspeed_rl.engine_control import ControlVerbs
from tokenspeed_rl.engine_experts import ExpertVerbs
from tokenspeed_rl.engine_profile import ProfileVerbs
from tokenspeed_rl.engine_scores import ScoreVerbs
from tokenspeed_rl.engine_sessions import SessionVerbs
from tokenspeed_rl.engine_state import StateVerbs
from tokenspeed_rl.engine_weights import WeightVerbs
from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.explanation import Explanation
from tokenspeed_rl.llm import LLM
from tokenspeed_rl.prompts import chat_ids
from tokenspeed_rl.requests import FlushCacheReqOutput, GenerateReqInput
from tokenspeed_rl.sampling_params import SamplingParams, check_timeout

Params = SamplingParams | Mapping[str, Any] | Sequence[SamplingParams | Mapping[str, Any]] | None


class Engine(
    WeightVerbs,
    ControlVerbs,
    ScoreVerbs,
    SessionVerbs,
    ExpertVerbs,
    StateVerbs,
    ProfileVerbs,
):
    """Generates inside the trainer's process; any method may be called from any thread while another
    generates.

    Args:
        model: a Hugging Face directory or hub id (safetensors), a transformers config (seeded random
            weights), or a live transformers model, whose parameters are then shared, not copied: a causal
            LM, plain or with PEFT's LoRA adapters, or a ForSequenceClassification or
            ForTokenClassification, which only scores (`encode`).
        tokenizer: a transformers tokenizer; None takes the one in the model's directory, if there is one.
        config: settings; `overrides` are `EngineConfig` fields that win over it.
        process_group: reserved for tensor parallelism; only None in this version.

    Raises:
        ConfigError, WeightUpdateError: this engine can't be built; a live model is left as it was.

    `client` is its AsyncLLM (the `EngineClient`), `llm` its LLM. Where the client returns a refusal, these
    methods raise its typed error.
    """

    client: AsyncLLM

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        process_group: Any = None,
        **overrides: Any,
    ) -> None:
        self.client = AsyncLLM(
            model, tokenizer=tokenizer, config=config, process_group=process_group, **overrides
        )
        self.llm = LLM(self.client)

    # Generation

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Params = None,
        *,
        input_ids: Any = None,
        return_logprob: bool = False,
        stream: bool = False,
        wait: bool = False,
        timeout: float | None = None,
        use_tqdm: bool = False,
        **request_fields: Any,
    ) -> Any:
        """Generate from one prompt (a dict comes back) or a list of prompts, or `n > 1` (a list comes back).

        Args:
            prompt: text; or `input_ids`: token ids. Exactly one of the two.
            sampling_params: for all prompts, or a list with one for each. Without `max_new_tokens` a sample
                may grow up to the model's context.
            return_logprob: return the logprob of every output token.
            stream: return an iterator of messages as tokens come; the requests are submitted at this call.
            wait: wait for the wake, the resume or valid weights instead of raising.
            timeout: seconds, after which the requests are aborted. Not for streams.
            use_tqdm: show a progress bar that counts samples. Not for streams.
            request_fields: other fields of `GenerateReqInput`.

        Raises:
            RequestError: malformed, or can never be served; nothing was queued.
            EngineStateError: asleep, paused or about to sleep. WeightsInvalidError: no complete set of
                weights. EngineTimeoutError: the timeout passed.
        """
        obj = self._request(prompt, sampling_params, input_ids, return_logprob, stream, request_fields)
        check_timeout(timeout)
        if stream:
            if timeout is not None or use_tqdm:
                raise RequestError(
                    "timeout and use_tqdm are not for streams", fix="Leave them out, or stream=False."
                )
            return self.llm.generate_stream(obj, wait=wait)
        if use_tqdm:
            return self.llm.generate_with_bar(obj, timeout, wait=wait)
        return self.llm.generate(obj, timeout, wait=wait)

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Params = None,
        *,
        input_ids: Any = None,
        return_logprob: bool = False,
        stream: bool = False,
        wait: bool = False,
        timeout: float | None = None,
        **request_fields: Any,
    ) -> Any:
        """As `generate`, from a coroutine on any event loop; with `stream` an asynchronous iterator comes
        back."""
        obj = self._request(prompt, sampling_params, input_ids, return_logprob, stream, request_fields)
        if stream:
            if timeout is not None:
                raise RequestError("timeout is not for streams", fix="Leave it out, or stream=False.")
            messages: AsyncIterator[Any] = self.client.submit(obj, wait=wait)
            return messages
        return await self.client.generate(obj, timeout=timeout, wait=wait)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Params = None,
        *,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **generate_arguments: Any,
    ) -> Any:
        """Generate the next message of one conversation, or of a list of them.

        The tokenizer's chat template (or `chat_template`) makes the prompt; with `continue_final_message` the
        last message is gone on with. `generate_arguments` are those of `generate`.
        """
        ids = chat_ids(
            self.client.tokenizer,
            messages,
            tools=tools,
            chat_template=chat_template,
            continue_final_message=continue_final_message,
            template_kwargs=chat_template_kwargs or {},
        )
        return self.generate(sampling_params=sampling_params, input_ids=ids, **generate_arguments)

    def abort(self, rid: str | None = None) -> None:
        """End a request now, with what it has; None: all. Unknown or finished: no-op."""
        if rid is None:
            self.client.abort_all()
        else:
            self.client.abort_request(rid)

    def explain(
        self,
        output: Mapping[str, Any],
        module: nn.Module,
        *,
        temperature: float = 1.0,
        tolerance: float | None = None,
    ) -> Explanation:
        """Why does the trainer's `module` see other logprobs than this rollout? `print` the answer.

        The output's sequence is recomputed by the module, on this thread under its autocast and in eval mode,
        and by the engine with the weights it has now. Logits and all hidden states of the sequence exist at
        once for that.

        Args:
            output: one final result of `generate`, best with `return_logprob`.
            module: a transformers causal LM with the engine's architecture, or a wrapper of one.
            temperature: with which the output was sampled.
            tolerance: differences up to it count as none; None: 1e-4, or 0.05 for half-precision weights.

        Raises:
            RequestError: the output is no whole result, or the module no causal LM. EngineStateError: the
                weights sleep or are half written. WeightsInvalidError: there is no complete set.
        """
        return self.client.explain(output, module, temperature, tolerance)

    # State

    def flush_cache(self) -> FlushCacheReqOutput:
        """Forget all cached prefixes."""
        return self.llm.run(self.client.flush_cache())

    # End

    def shutdown(self) -> None:
        """End the engine and free what is its own; whoever waits gets EngineShutdownError. Idempotent."""
        self.client.shutdown()
        self.llm.shutdown()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    @staticmethod
    def _request(
        prompt: Any, params: Params, input_ids: Any, logprob: bool, stream: bool, fields: dict[str, Any]
    ) -> GenerateReqInput:
        return make_request(
            GenerateReqInput,
            fields,
            text=prompt,
            input_ids=input_ids,
            sampling_params=params,
            return_logprob=logprob,
            stream=stream,
        )
