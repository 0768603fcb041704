"""One sample on its way through the engine, and what it has produced so far."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenspeed_rl.cache.prefix_cache import Node
from tokenspeed_rl.core.text import IncrementalText
from tokenspeed_rl.lifecycle.sessions import Turn
from tokenspeed_rl.sampling_params import SamplingParams

FinishReason = dict[str, Any]
ABANDONED = ("abandoned by its caller", "its caller's event loop is closed")
"""Messages of samples that ended since nobody listens."""


class Status(enum.Enum):
    """Where a request stands with the scheduler."""

    NEW = enum.auto()
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """What a request asked to be told besides its tokens."""

    logprob: bool = False
    kinds: tuple[str, ...] = ("sampling",)
    prompt_start: int = -1
    """First prompt position whose logprob is wanted; -1: none."""
    top: int = 0
    token_ids: tuple[int, ...] = ()
    text: bool = False
    """The text of each token beside its logprob."""
    sampling_mask: bool = False
    hidden_states: bool = False
    reading: str | None = None
    """What to read off the prompt's hidden states, instead of generating; see `models.head.Reading`."""
    labels: int = 0
    """Numbers of a score; 0: it is an embedding."""
    padding: int = 0
    """Pad tokens that stood behind the prompt, and are not computed."""
    routed_experts: bool = False


@dataclass(slots=True)
class Span:
    """Output tokens [start, end) were sampled under one weight version."""

    version: str
    start: int
    end: int


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """State of one sample. The loop's thread owns it; finished, it no longer changes.

    `tokens` is prompt plus output; `computed` of them have keys and values in `pages`. What was sampled once
    is kept whatever happens to the KV: a retracted request loses `pages` and `computed`, nothing else.
    """

    rid: str
    index: int
    prompt_index: int
    prompt_len: int
    tokens: list[int]
    params: SamplingParams
    wants: Wants
    priority: int
    arrival: int
    draw_seed: int
    max_new_tokens: int
    stop_ids: frozenset[int]
    banned_ids: tuple[int, ...]
    """Ids that end a sample, masked until `min_new_tokens` are there."""
    created: float
    publish: Callable[["Request"], None]
    """Called on the loop's thread when there is news for whoever waits."""
    lora: str | None = None
    """Name of the adapter that it is computed with; None: the base model."""
    turn: Turn | None = None
    """Of a session, which its end continues."""

    status: Status = Status.NEW
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    node: Node | None = None
    """Prefix-cache node of the last page kept there; None: not admitted."""
    kept_pages: int = 0
    """How many of `pages`, from the first, the prefix cache has."""
    borrowed: bool = False
    """Another request computed the KV of some of `pages`."""
    spared: list[int] = field(default_factory=list)
    """Numbers of `pages` that it computes anew in this step, and doesn't write: they are another's."""
    alone: bool = False
    """It borrows nothing and lends nothing: what it had borrowed may have been at fault."""
    mixed: bool = False
    """The weights changed since its KV was begun: kept under a pause, shared with nobody, given up last."""
    leader: "Request | None" = None
    """The running request that computes this one's identical prompt."""
    followers: list["Request"] = field(default_factory=list)

    cached_tokens: int | None = None
    spans: list[Span] = field(default_factory=list)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    top_logprobs: list[list[tuple[float, int]]] = field(default_factory=list)
    ids_logprobs: list[list[float]] = field(default_factory=list)
    masks: list[list[int]] = field(default_factory=list)
    hidden_states: list[list[float]] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    readings: list[list[float]] = field(default_factory=list)
    """Per token of the prompt that is read, so far, all under the same weights."""
    routes: list[npt.NDArray[np.int16]] = field(default_factory=list)
    """Where they are asked for: per token, from the first on, its experts [layers, k] in the forward that led
    to the draw of the next. What is known of a sampled token's past is never computed again."""
    finish_reason: FinishReason | None = None
    finished_at: float = 0.0
    """Seconds of `time.monotonic`, as `created`."""
    text: IncrementalText | None = None
    """Kept by the stop check where stop strings are asked for."""
    stop_at: int | None = None
    """Where in `text` the stop string that ended the sample begins."""

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed before the next draw."""
        return len(self.tokens) - self.computed

    @property
    def is_decoding(self) -> bool:
        return self.remaining == 1 and len(self.tokens) > self.prompt_len

    @property
    def seniority(self) -> tuple[bool, int]:
        """Order among running requests; whoever comes last gives up its pages first."""
        return (not self.mixed, self.arrival)

    @property
    def rank(self) -> tuple[int, int]:
        """Order of the queue: higher priority first, then first come."""
        return (-self.priority, self.arrival)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt logprobs are asked for and not there yet."""
        start = self.wants.prompt_start
        return start >= 0 and len(self.prompt_logprobs) < self.prompt_len - 1 - start

    @property
    def reusable_prompt(self) -> int:
        """How many leading tokens may come out of the cache: those of whose hidden states nobody asked for
        anything, and whose routes are known or not asked for."""
        if self.alone or self.wants.reading == "values":
            return 0
        limit = len(self.tokens) - 1
        if self.wants_prompt_logprobs:
            limit = min(limit, self.wants.prompt_start)
        return min(limit, len(self.routes)) if self.wants.routed_experts else limit

    def record(self, token: int, version: str) -> None:
        """Append a sampled token."""
        self.tokens.append(token)
        end = self.output_len
        if self.spans and self.spans[-1].version == version:
            self.spans[-1].end = end
        else:
            self.spans.append(Span(version, end - 1, end))
