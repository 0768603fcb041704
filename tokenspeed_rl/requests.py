"""Request and reply structs of the protocol: keyword dataclasses that hold no engine state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.prompts import is_batch, split_prompts, split_rids, split_sampling_params
from tokenspeed_rl.sampling_params import (
    SamplingParams,
    check_bool,
    check_integer,
    check_token_ids,
)

SamplingParamsLike: TypeAlias = SamplingParams | Mapping[str, Any]

LOGPROB_KINDS = ("sampling", "raw", "processed")


class SupportsToList(Protocol):
    """A torch tensor or numpy array of ids."""

    def tolist(self) -> Any:
        """The ids as (nested) lists of ints."""
        ...


@dataclasses.dataclass(slots=True, kw_only=True)
class GenerateReqInput:
    """Generate from one prompt or a list of prompts. Exactly one of `text` and `input_ids` is given."""

    text: str | Sequence[str] | None = None
    """Prompts to tokenise; needs a tokenizer."""
    input_ids: Sequence[int] | Sequence[Sequence[int]] | SupportsToList | None = None
    """Prompts as token ids, used as they are; ints, numpy ints, or 1-D arrays and tensors."""
    sampling_params: SamplingParamsLike | Sequence[SamplingParamsLike] | None = None
    """For all prompts, or a list with one for each; None: the defaults."""
    rid: str | Sequence[str] | None = None
    """Request id, a list for a list of prompts; None: random ones. The `n` samples of a prompt share it."""
    return_logprob: bool = False
    """Return the logprob of every output token."""
    logprob_start_len: int = -1
    """>= 0: also return the prompt's logprobs from this position on."""
    top_logprobs_num: int = 0
    """Also return the logprobs of so many most likely tokens at every position."""
    token_ids_logprob: Sequence[int] | None = None
    """Also return the logprobs of these ids at every position."""
    logprob_kinds: Sequence[str] = ("sampling",)
    """Of "sampling" (temperature only), "raw" (temperature 1) and "processed" (what was drawn from)."""
    return_text_in_logprobs: bool = False
    """Fill the text of each logprob triple; it is None otherwise."""
    return_sampling_mask: bool = False
    """Return the ids that top-k, top-p and min-p kept, per token."""
    return_routed_experts: bool = False
    """Return each token's experts, [tokens, layers, k], likeliest first (-1: a layer without experts).

    Row p is of token p of prompt and output, in the forward that led to the draw of token p + 1; so the last
    token has none."""
    return_hidden_states: bool = False
    """Return the last hidden state of each token."""
    stream: bool = False
    """Yield results as tokens come instead of once at the end."""
    session_params: Mapping[str, Any] | None = None
    """`{"id": session}`: one prompt, with `n=1`, that continues this session; see `AsyncLLM.open_session`."""
    priority: int = 0
    """Higher is admitted first, ties in order of arrival; nothing running is preempted for it."""
    lora: str | None = None
    """Name of an adapter in a shared PEFT module; None: the base model."""

    @property
    def is_batch(self) -> bool:
        """Whether a list of prompts was given (also one of length 1)."""
        return is_batch(self.text, self.input_ids)

    def split(self, *, vocab_size: int | None = None, has_tokenizer: bool = True) -> list[GenerateReqInput]:
        """One checked request per prompt: `rid` filled in, ids as tuples, validated `SamplingParams`.

        Args:
            vocab_size: rows of the model's embedding, padding included; None: ids have no upper bound.
            has_tokenizer: whether text prompts, stop strings and `return_text_in_logprobs` can be served.

        Raises:
            RequestError: the first thing that is wrong.
        """
        known: dict[str, Any] = {"vocab_size": vocab_size, "has_tokenizer": has_tokenizer}
        prompts = split_prompts(self.text, self.input_ids, **known)
        rids = split_rids(self.rid, len(prompts), self.is_batch)
        params = split_sampling_params(self.sampling_params, len(prompts), self.is_batch, **known)
        _check_options(self, **known)
        watched, kinds = self.token_ids_logprob, self.logprob_kinds
        if watched is not None:
            watched = check_token_ids("token_ids_logprob", watched, vocab_size)
        shared = dataclasses.replace(self, token_ids_logprob=watched, logprob_kinds=_logprob_kinds(kinds))
        return [
            dataclasses.replace(shared, text=text, input_ids=ids, rid=rid, sampling_params=one)
            for (text, ids), rid, one in zip(prompts, rids, params, strict=True)
        ]


@dataclasses.dataclass(slots=True, kw_only=True)
class EmbeddingReqInput:
    """Embed or score one prompt or a list of prompts. Exactly one of `text` and `input_ids` is given.

    A causal LM gives the last token's hidden state after the final norm, at length 1; a reward model
    (`ForSequenceClassification`) the logits at the last token that is not the config's `pad_token_id`, as
    transformers; a value model (`ForTokenClassification`) those at every token. One label is a float, more
    are a list of floats.
    """

    text: str | Sequence[str] | None = None
    """Prompts to tokenise; needs a tokenizer."""
    input_ids: Sequence[int] | Sequence[Sequence[int]] | SupportsToList | None = None
    """Prompts as token ids, used as they are."""
    rid: str | Sequence[str] | None = None
    """Request id, a list for a list of prompts; None: random ones."""

    @property
    def is_batch(self) -> bool:
        """Whether a list of prompts was given (also one of length 1)."""
        return is_batch(self.text, self.input_ids)

    def split(self, *, vocab_size: int | None = None, has_tokenizer: bool = True) -> list[EmbeddingReqInput]:
        """One checked request per prompt, as `GenerateReqInput.split`."""
        prompts = split_prompts(self.text, self.input_ids, vocab_size=vocab_size, has_tokenizer=has_tokenizer)
        rids = split_rids(self.rid, len(prompts), self.is_batch)
        return [
            EmbeddingReqInput(text=text, input_ids=ids, rid=rid)
            for (text, ids), rid in zip(prompts, rids, strict=True)
        ]


@dataclasses.dataclass(slots=True, kw_only=True)
class OpenSessionReqInput:
    """Open a session that holds at most `capacity_of_str_len` tokens (the name is historical)."""

    capacity_of_str_len: int
    session_id: str | None = None


@dataclasses.dataclass(slots=True, kw_only=True)
class CloseSessionReqInput:
    """Close a session and forget its tokens."""

    session_id: str


@dataclasses.dataclass(slots=True, kw_only=True)
class FlushCacheReqOutput:
    """Whether the prefix cache was dropped, and if not, why."""

    success: bool
    message: str = ""


@dataclasses.dataclass(slots=True, kw_only=True)
class ConfigureLoggingReq:
    """What to log about requests; None leaves a setting as it is."""

    log_requests: bool | None = None
    log_requests_level: int | None = None
    """0: ids and counts, 1: also sampling parameters, 2: also prompts and outputs."""
    dump_requests_folder: str | None = None
    """Where requests and results are written, in files of mode 0600."""
    dump_requests_threshold: int | None = None
    """Requests per file."""


@dataclasses.dataclass(slots=True, kw_only=True)
class InitWeightsUpdateGroupReqInput:
    """Join the group of a weight sender; this receiver's rank is `rank_offset` + its tensor-parallel rank."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"
    timeout: float = 60.0
    """Seconds."""


@dataclasses.dataclass(slots=True, kw_only=True)
class DestroyWeightsUpdateGroupReqInput:
    """Leave a weight group."""

    group_name: str = "weight_update_group"


@dataclasses.dataclass(slots=True, kw_only=True)
class UpdateWeightsFromDistributedReqInput:
    """Receive the named weights over a group; `names`, `dtype_names` and `shapes` run in parallel."""

    names: Sequence[str]
    dtype_names: Sequence[str]
    shapes: Sequence[Sequence[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    weight_version: str | None = None
    """Label of the new weights; None: the number of updates so far."""
    load_format: str | None = None
    """None: one broadcast from rank 0 per name, in order; "flattened_bucket": the sender's framing."""
    partial: bool = False
    """Not a complete set of weights."""
    atomic: bool = False
    """Journal what is overwritten, and put it back if the transfer fails."""
    timeout: float = 60.0
    """Seconds."""


@dataclasses.dataclass(slots=True, kw_only=True)
class UpdateWeightsFromTensorReqInput:
    """Copy weights from this process: out of `named_tensors` or `serialized_named_tensors`, not both."""

    named_tensors: Mapping[str, Any] | Iterable[tuple[str, Any]] | Any | None = None
    """(Hugging Face name, tensor) pairs, or a `tokenspeed_rl.weights.FlattenedBucket`."""
    serialized_named_tensors: Sequence[bytes] | None = None
    """Safetensors bytes, one per tensor-parallel rank; never pickle."""
    load_format: str | None = None
    """None, or "flattened_bucket"."""
    flush_cache: bool = True
    weight_version: str | None = None
    """Label of the new weights; None: the number of updates so far."""
    partial: bool = False
    """Not a complete set of weights."""
    atomic: bool = False
    """Journal what is overwritten, and put it back if the iterator fails."""
    timeout: float | None = None
    """Seconds; None: as long as it takes."""


@dataclasses.dataclass(slots=True, kw_only=True)
class UpdateWeightFromDiskReqInput:
    """Replace the weights by those of a safetensors directory or hub id of the same architecture."""

    model_path: str
    load_format: str | None = None
    """None: as the engine's config."""
    weight_version: str | None = None
    """Label of the new weights; None: the number of updates so far."""
    flush_cache: bool = True


@dataclasses.dataclass(slots=True, kw_only=True)
class GetWeightsByNameReqInput:
    """Read the first `truncate_size` rows of a parameter by its Hugging Face name."""

    name: str
    truncate_size: int = 100


@dataclasses.dataclass(slots=True, kw_only=True)
class ReleaseMemoryOccupationReqInput:
    """Give memory back. Tags: "weights", "kv_cache", "cuda_graph", or several; None: what is resident."""

    tags: str | Sequence[str] | None = None


@dataclasses.dataclass(slots=True, kw_only=True)
class ResumeMemoryOccupationReqInput:
    """Take memory again. Tags as for release; None: exactly what sleeps."""

    tags: str | Sequence[str] | None = None


@dataclasses.dataclass(slots=True, kw_only=True)
class SetInternalStateReq:
    """Change `EngineConfig` fields that can change while running, and the label of the weights."""

    server_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weight_version: str | None = None
    """None leaves it as it is."""


@dataclasses.dataclass(slots=True, kw_only=True)
class GetLoadReqOutput:
    """How busy a data-parallel rank is."""

    dp_rank: int
    num_reqs: int
    """All unfinished samples."""
    num_waiting_reqs: int
    """Of those, the ones not running."""
    num_pages: int
    """KV pages in use."""


def _check_options(request: GenerateReqInput, *, vocab_size: int | None, has_tokenizer: bool) -> None:
    for field in dataclasses.fields(request):
        if field.type == "bool":
            check_bool(field.name, getattr(request, field.name))
    check_integer("logprob_start_len", request.logprob_start_len, low=-1)
    check_integer("top_logprobs_num", request.top_logprobs_num, low=0, high=vocab_size)
    check_integer("priority", request.priority)
    if not request.return_logprob:
        _refuse_logprob_options(request)
    if request.return_text_in_logprobs and not has_tokenizer:
        raise RequestError(
            "return_text_in_logprobs needs a tokenizer, and this engine has none", fix="Leave it out."
        )
    session, lora = request.session_params, request.lora
    if session is not None and not (isinstance(session, Mapping) and set(session) == {"id"}):
        raise RequestError(
            'session_params must be {"id": session}', got=session, fix="Pass an open session's id."
        )
    if lora is not None and not (isinstance(lora, str) and lora):
        raise RequestError("lora must be the name of an adapter", got=lora, fix="None is the base model.")


def _refuse_logprob_options(request: GenerateReqInput) -> None:
    """Without `return_logprob` these would be ignored, so they must be at their defaults."""
    for field in dataclasses.fields(request):
        if "logprob" not in field.name:
            continue
        value = getattr(request, field.name)
        if (tuple(value) if isinstance(value, list) else value) != field.default:
            raise RequestError(
                f"{field.name} needs return_logprob=True",
                got=value,
                fix="Set return_logprob=True, or leave it out.",
            )


def _logprob_kinds(kinds: str | Iterable[str]) -> tuple[str, ...]:
    found = (kinds,) if isinstance(kinds, str) else tuple(kinds) if isinstance(kinds, Iterable) else ()
    if not found or not all(kind in LOGPROB_KINDS for kind in found):
        raise RequestError(
            f"logprob_kinds must be of {', '.join(LOGPROB_KINDS)}",
            got=kinds,
            fix='The default is ("sampling",).',
        )
    return found
