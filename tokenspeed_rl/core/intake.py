"""From what a caller asks for to the samples that the loop runs: everything is checked here, before anything
is queued."""

import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenspeed_rl.core.request import Request, Wants
from tokenspeed_rl.core.seeds import draw_seed
from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.lifecycle.sessions import Sessions, Turn
from tokenspeed_rl.requests import EmbeddingReqInput, GenerateReqInput
from tokenspeed_rl.sampling_params import SamplingParams

NO_TOKENS = SamplingParams(max_new_tokens=0)


@dataclass(slots=True)
class Intake:
    """What a request is held against. Used from any thread; running numbers are handed out atomically."""

    vocab_size: int
    context: int
    """Most tokens of prompt and output together."""
    eos_ids: tuple[int, ...]
    tokenizer: Any
    seed: int
    reading: str
    """What an `EmbeddingReqInput` reads."""
    labels: int
    """Numbers of a score; 0: the model generates."""
    pad_id: Callable[[], int | None]
    """The id behind whose last other one a sequence's score stands, as the model's config says it now."""
    has_experts: bool
    """Whether there are routes to be asked for."""
    adapters: Callable[[], Collection[str]]
    """Names of the adapters that there are, as of now."""
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _arrivals: "itertools.count[int]" = field(default_factory=itertools.count)

    @classmethod
    def create(
        cls,
        *,
        vocab_size: int,
        context: int,
        eos_ids: Sequence[int],
        tokenizer: Any,
        seed: int,
        reading: str = "embedding",
        labels: int = 0,
        pad_id: Callable[[], int | None] = lambda: None,
        has_experts: bool = False,
        adapters: Callable[[], Collection[str]] = tuple,
    ) -> "Intake":
        """An intake whose running numbers begin at 0."""
        eos = tuple(eos_ids)
        return cls(vocab_size, context, eos, tokenizer, seed, reading, labels, pad_id, has_experts, adapters)

    def prepare(
        self,
        obj: GenerateReqInput | EmbeddingReqInput,
        *,
        capacity: int | None,
        publish: Callable[[Request], None],
        sessions: Sessions | None = None,
    ) -> list[Request]:
        """All samples of `obj`, prompt-major, samples of a prompt adjacent.

        Args:
            obj: as the caller gave it.
            capacity: tokens the KV cache holds; None: as yet unknown, so that nothing is too long for it.
            publish: whom to tell of progress.
            sessions: those that a prompt may be a turn of; None: none is open.

        Raises:
            RequestError: nothing of it was queued. EngineStateError: its session has a
                live turn.
        """
        reads = isinstance(obj, EmbeddingReqInput)
        if isinstance(obj, EmbeddingReqInput):
            obj = GenerateReqInput(
                text=obj.text, input_ids=obj.input_ids, rid=obj.rid, sampling_params=NO_TOKENS
            )
        elif self.labels:
            raise RequestError(
                "this model scores and doesn't generate",
                got="a GenerateReqInput",
                fix="Pass an EmbeddingReqInput, or call encode().",
            )
        prompts = obj.split(vocab_size=self.vocab_size, has_tokenizer=self.tokenizer is not None)
        if obj.return_routed_experts and not self.has_experts:
            raise RequestError(
                "return_routed_experts is for mixtures of experts, and this model has none",
                got=obj.return_routed_experts,
                fix="Leave it out.",
            )
        self._check_adapter(obj.lora)
        turn = None if obj.session_params is None else _turn(prompts, sessions or Sessions())
        return [
            request
            for prompt_index, prompt in enumerate(prompts)
            for request in self._samples(prompt, prompt_index, capacity, publish, turn, reads)
        ]

    def _samples(
        self,
        obj: GenerateReqInput,
        prompt_index: int,
        capacity: int | None,
        publish: Callable[[Request], None],
        turn: Turn | None,
        reads: bool,
    ) -> list[Request]:
        params = obj.sampling_params
        assert isinstance(params, SamplingParams) and isinstance(obj.rid, str)
        former = () if turn is None else turn.tokens
        tokens, wants = [*former, *self._tokens(obj, special=not former)], _wants(obj)
        if reads:
            tokens, wants = self._read(tokens)
        max_new = self._room(len(tokens), params, capacity)
        if turn is not None:
            max_new = min(max_new, turn.room(len(tokens), params.max_new_tokens))
        if obj.logprob_start_len >= len(tokens):
            raise RequestError(
                f"logprob_start_len must lie within the prompt of {len(tokens)} tokens",
                got=obj.logprob_start_len,
                fix="Pass 0 for the logprobs of the whole prompt.",
            )
        stop_ids = frozenset((*(() if params.ignore_eos else self.eos_ids), *(params.stop_token_ids or ())))
        number, created = next(self._numbers), time.monotonic()
        return [
            Request(
                rid=obj.rid,
                index=index,
                prompt_index=prompt_index,
                prompt_len=len(tokens),
                tokens=list(tokens),
                params=params,
                wants=wants,
                priority=obj.priority,
                lora=obj.lora,
                arrival=next(self._arrivals),
                draw_seed=draw_seed(params.seed, index, engine_seed=self.seed, number=number),
                max_new_tokens=max_new,
                stop_ids=stop_ids,
                banned_ids=tuple(sorted(stop_ids)),
                created=created,
                publish=publish,
                turn=turn,
            )
            for index in range(params.n)
        ]

    def _read(self, tokens: list[int]) -> tuple[list[int], Wants]:
        """The tokens that a reading needs, and what it wants.

        transformers scores a sequence at its last token that is no pad, or at its first if all are.
        """
        needed, pad = len(tokens), self.pad_id()
        while self.reading == "score" and needed > 1 and tokens[needed - 1] == pad:
            needed -= 1
        padding = len(tokens) - needed
        return tokens[:needed], Wants(reading=self.reading, labels=self.labels, padding=padding)

    def _check_adapter(self, name: str | None) -> None:
        if name is not None and name not in (there := self.adapters()):
            raise RequestError(
                f"the model has no such adapter; it has {', '.join(map(repr, sorted(there))) or 'none'}",
                got=name,
                fix="Pass the name of an adapter in the shared PEFT module, or lora=None for the base model.",
            )

    def _tokens(self, obj: GenerateReqInput, *, special: bool) -> list[int]:
        """Ids as they are, or those of the text, with the tokenizer's own around them where `special`."""
        if obj.input_ids is not None:
            return list(obj.input_ids)  # type: ignore[arg-type]  # split() made it a flat sequence of ids
        try:
            options = {} if special else {"add_special_tokens": False}
            tokens = list(self.tokenizer(obj.text, **options)["input_ids"])
        except Exception as error:  # a lone surrogate, say: kinds differ from tokenizer to tokenizer
            raise RequestError(
                f"the tokenizer refuses the text: {error}", got=obj.text, fix="Pass text it can encode."
            ) from error
        if not tokens:
            raise RequestError(
                "the prompt has no tokens", got=obj.text, fix="Pass at least one token to go on from."
            )
        if (bad := max(tokens)) >= self.vocab_size:
            raise RequestError(
                f"the tokenizer gave an id outside the model's vocabulary of {self.vocab_size}",
                got=bad,
                fix="Pass the tokenizer that belongs to the model, or input_ids.",
            )
        return tokens

    def _room(self, prompt_len: int, params: SamplingParams, capacity: int | None) -> int:
        """How many tokens may be generated."""
        if capacity is None:
            capacity = max(self.context, prompt_len + (params.max_new_tokens or 0))
        scoring = params.max_new_tokens == 0
        if prompt_len > self.context or (prompt_len == self.context and not scoring):
            raise RequestError(
                f"a prompt of {prompt_len} tokens leaves no room in the context of {self.context}",
                fix="Shorten the prompt, or raise max_model_len if the model allows it.",
            )
        wanted = params.max_new_tokens
        if prompt_len + (1 if wanted is None else wanted) > capacity:
            raise RequestError(
                f"a prompt of {prompt_len} tokens plus max_new_tokens exceeds the KV capacity of {capacity}",
                got=wanted,
                fix="Lower max_new_tokens, shorten the prompt, or raise max_total_tokens.",
            )
        room = min(self.context, capacity) - prompt_len
        return room if wanted is None else min(wanted, self.context - prompt_len)


def _wants(obj: GenerateReqInput) -> Wants:
    return Wants(
        logprob=obj.return_logprob,
        kinds=tuple(obj.logprob_kinds),
        prompt_start=obj.logprob_start_len if obj.return_logprob else -1,
        top=obj.top_logprobs_num,
        token_ids=tuple(obj.token_ids_logprob or ()),
        text=obj.return_text_in_logprobs,
        sampling_mask=obj.return_sampling_mask,
        hidden_states=obj.return_hidden_states,
        routed_experts=obj.return_routed_experts,
    )


def _turn(prompts: Sequence[GenerateReqInput], sessions: Sessions) -> Turn:
    """The turn that these prompts, of which there must be one, ask for."""
    session, params = prompts[0].session_params, prompts[0].sampling_params
    assert session is not None and isinstance(params, SamplingParams)
    if len(prompts) > 1 or params.n > 1:
        raise RequestError(
            "a session has one live turn at a time: one prompt, with n=1",
            got={"prompts": len(prompts), "n": params.n},
            fix="Open a session for each, or make the calls one after the other.",
        )
    return sessions.turn(session["id"])
