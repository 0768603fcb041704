"""What the tests of the core share: requests, a tokenizer built here, and a scheduler driven by an imagined
model, with every promise about a step checked at every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from tokenspeed_rl.cache.page_pool import PagePool
from tokenspeed_rl.cache.prefix_cache import PrefixCache
from tokenspeed_rl.core.batch import Chunk, StepPlan
from tokenspeed_rl.core.request import FinishReason, Request, Status, Wants
from tokenspeed_rl.core.scheduler import Scheduler
from tokenspeed_rl.sampling_params import SamplingParams

STOP, BROKEN, VOCAB = 0, 99, 12
"""Drawing STOP ends a sample; a prompt with BROKEN in it has logits that are not finite."""
PARAMS = SamplingParams().validate()
Content = tuple[int, str | None, tuple[int, ...]]
"""What a slot of the cache holds: the weights' epoch, the adapter, and all tokens up to and with its own."""


def make_request(prompt: Iterable[int], **fields: Any) -> Request:
    """One sample of `prompt`, with the fields of `Request` that matter."""
    tokens = list(prompt)
    defaults: dict[str, Any] = {
        "rid": "r",
        "index": 0,
        "prompt_index": 0,
        "prompt_len": len(tokens),
        "tokens": tokens,
        "params": PARAMS,
        "wants": Wants(),
        "priority": 0,
        "arrival": 0,
        "draw_seed": 0,
        "max_new_tokens": 4,
        "stop_ids": frozenset(),
        "banned_ids": (),
        "created": 0.0,
        "publish": lambda request: None,
    }
    return Request(**{**defaults, **fields})


def next_token(tokens: list[int], request: Request) -> int:
    """What the imagined model draws for `request` after `tokens`."""
    token = hash((request.draw_seed, *map(ord, request.lora or ""), *tokens)) % VOCAB
    return token if token != STOP or STOP in request.stop_ids else 1


def expected_output(request: Request) -> list[int]:
    """What a request must end with, worked out by itself."""
    tokens = request.tokens[: request.prompt_len]
    while len(tokens) < request.prompt_len + request.max_new_tokens:
        tokens.append(next_token(tokens, request))
        if tokens[-1] == STOP:
            break
    return tokens[request.prompt_len :]


class Simulation:
    """Scheduler, cache and pool as the engine has them; the model is `next_token`, its cache a dict.

    `step` runs one step and checks all of it: what the plan may hold, that every slot which attention reads
    has exactly the content it must have, and where every page is. Unless it `stops`, every sample runs to its
    length.
    """

    def __init__(
        self,
        *,
        pages: int,
        page_size: int = 2,
        max_running: int = 8,
        budget: int = 8,
        caching: bool = True,
        stops: bool = False,
        arrival: Callable[[int], int] = int,
    ) -> None:
        self.pool = PagePool(pages)
        self.cache = PrefixCache(self.pool, page_size, enabled=caching)
        self.scheduler = Scheduler(self.cache, max_running=max_running, prefill_budget=budget)
        self.arrival = arrival
        self.stop_ids = frozenset({STOP} if stops else ())
        self.requests: list[Request] = []
        self.slots: dict[tuple[int, int], Content] = {}
        self.epoch = 0
        self.steps = 0
        self.prefilled = 0
        self.retracted: list[Request] = []
        self.ended: list[Request] = []

    @property
    def live(self) -> list[Request]:
        return [request for request in self.requests if not request.finished]

    @property
    def capacity(self) -> int:
        return self.pool.num_pages * self.cache.page_size

    def add(
        self,
        prompt: Iterable[int],
        *,
        n: int = 1,
        max_new: int = 4,
        priority: int = 0,
        prompt_start: int = -1,
        lora: str | None = None,
    ) -> list[Request]:
        """Queue `n` samples of a prompt."""
        tokens = list(prompt)
        assert len(tokens) + max_new <= self.capacity
        added = [
            make_request(
                tokens,
                index=index,
                wants=Wants(prompt_start=prompt_start),
                priority=priority,
                lora=lora,
                arrival=self.arrival(len(self.requests) + index),
                draw_seed=index,
                max_new_tokens=max_new,
                stop_ids=self.stop_ids,
            )
            for index in range(n)
        ]
        self.requests += added
        for request in added:
            self.scheduler.add(request)
        return added

    def abort(self, request: Request) -> None:
        self._end(request, {"type": "abort", "message": "aborted"})

    def retract(self, request: Request) -> None:
        self.scheduler.retract(request)
        assert request.pages == [] and request.computed == 0

    def change_weights(self) -> None:
        """As a weight update does: all that is in the cache is worthless from now on."""
        self.scheduler.retract_all()
        assert self.scheduler.running == []
        self.cache.flush()
        assert self.pool.num_used == 0
        self.epoch += 1

    def drain(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left; every request has ended then, and every page is back."""
        while self.scheduler.has_work:
            self.step()
            assert self.steps <= max_steps, "it doesn't end"
        assert self.live == [] and self.scheduler.num_waiting == 0
        assert self.cache.num_available == self.pool.num_pages

    def step(self, abort: Callable[[list[Request]], Iterable[Request]] = lambda live: ()) -> StepPlan:
        """One step; `abort` picks requests that are aborted while the model runs."""
        waiting = {r for r in self.live if r.status is Status.WAITING}
        running = {r: r.leader for r in self.scheduler.running}
        plan = self.scheduler.schedule()
        self.steps += 1
        self.prefilled += sum(chunk.count for chunk in plan.chunks)
        assert plan.is_empty == (not running and not waiting), "something could have run"
        self._check_plan(plan)
        self._check_order(plan, waiting, running)
        self.check_pages()
        self._compute(plan)
        aborted = list(abort(self.live))
        completed = [chunk.request for chunk in plan.chunks if chunk.completes]
        self.scheduler.advance(plan)
        for fork, leader in plan.forks.items():
            fork.prompt_logprobs = list(leader.prompt_logprobs)
        for request in [*plan.decodes, *completed, *plan.forks]:
            assert request.remaining == 0
            if request not in aborted:
                self._draw(request)
        for request in aborted:
            if not request.finished:
                self.abort(request)
        self.check_pages()
        return plan

    def _check_plan(self, plan: StepPlan) -> None:
        scheduler, size = self.scheduler, self.cache.page_size
        running = scheduler.running
        assert len(running) <= scheduler.max_running and len(set(running)) == len(running)
        assert all(r.status is Status.RUNNING for r in running)
        assert scheduler.num_waiting == len(self.live) - len(running)
        assert sum(chunk.count for chunk in plan.chunks) <= scheduler.prefill_budget
        planned = [*plan.decodes, *(chunk.request for chunk in plan.chunks), *plan.forks]
        assert len(set(planned)) == len(planned) and set(planned) <= set(running)
        assert plan.num_tokens == len(plan.decodes) + sum(chunk.count for chunk in plan.chunks)
        for chunk in plan.chunks:
            assert chunk.start == chunk.request.computed and chunk.count > 0
            assert chunk.start + chunk.count <= len(chunk.request.tokens)
        for request in running:
            if request.leader is not None:
                assert request.pages == [] and request not in planned and request.leader in running
                assert request.leader.tokens == request.tokens and request.leader.lora == request.lora
                continue
            assert request.pages and len(request.pages) == -(-len(request.tokens) // size)
            if request.is_decoding and request.computed:
                assert request in planned, "a running request decodes in every step"

    def _check_order(
        self, plan: StepPlan, waiting: set[Request], running: dict[Request, Request | None]
    ) -> None:
        """First come, first served among those who wait; last come, first retracted among those who run."""
        admitted = {r for r in waiting if r.status is Status.RUNNING or r in plan.forks}
        left = waiting - set(self.scheduler.running)
        passed = [r for r in left if any(r.rank < a.rank for a in admitted)]
        for request in passed:  # it was let in, but as a follower that then found no page for itself
            twins = [a for a in self.scheduler.running if a.lora == request.lora]
            assert any(a.tokens == request.tokens for a in twins)
            assert self.cache.num_available == 0
        victims = {r for r, leader in running.items() if leader is None and r.status is Status.WAITING}
        for request in running:
            if request.status is Status.RUNNING:
                assert all(request.arrival < victim.arrival for victim in victims)
        if victims:
            assert not admitted, "one was retracted for want of pages, and another let in"
        self.retracted += victims

    def check_pages(self) -> None:
        """Free and used pages add up; each has exactly the owners it should have, of equal beginnings."""
        running, size = self.scheduler.running, self.cache.page_size
        assert self.pool.num_free + self.pool.num_used == self.pool.num_pages
        owners = Counter(page for request in running for page in request.pages)
        assert all(len(set(request.pages)) == len(request.pages) for request in running)
        kept = [self.pool.holders(page) - owners[page] for page in range(self.pool.num_pages)]
        assert set(kept) <= {0, 1} and sum(kept) == self.cache.num_cached
        assert self.cache.num_idle == sum(more for page, more in enumerate(kept) if not owners[page])
        holders: dict[int, tuple[Request, int]] = {}
        for request in running:
            for number, page in enumerate(request.pages):
                other, place = holders.setdefault(page, (request, number))
                end = (number + 1) * size
                if other is not request:
                    assert place == number and other.pages[:number] == request.pages[:number]
                    assert other.lora == request.lora
                    assert other.tokens[:end] == request.tokens[:end] and len(request.tokens) >= end

    def _compute(self, plan: StepPlan) -> None:
        """Write all tokens of the step, then read every context, then copy."""
        spans = [Chunk(r, r.computed, 1) for r in plan.decodes] + plan.chunks
        written: dict[tuple[int, int], Content] = {}
        for span in spans:
            for position in range(span.start, span.start + span.count):
                content = self._content(span.request, position)
                assert written.setdefault(self._slot(span.request, position), content) == content
        self.slots.update(written)
        for span in spans:
            self._check_context(span.request, span.start + span.count)
            self._note_prompt_logprobs(span)
        for source, target in plan.copies:
            for offset in range(self.cache.page_size):
                if (source, offset) in self.slots:
                    self.slots[target, offset] = self.slots[source, offset]
        for fork, leader in plan.forks.items():
            assert leader.tokens == fork.tokens and fork.computed == fork.prompt_len == fork.cached_tokens
            self._check_context(fork, fork.prompt_len)

    def _note_prompt_logprobs(self, span: Chunk) -> None:
        request, start = span.request, span.request.wants.prompt_start
        if request.wants_prompt_logprobs:
            begin, end = max(span.start, start), min(span.start + span.count, request.prompt_len - 1)
            request.prompt_logprobs += [(self.epoch, at) for at in range(begin, end)]  # type: ignore[misc]

    def _check_context(self, request: Request, length: int) -> None:
        for position in range(length):
            assert self.slots[self._slot(request, position)] == self._content(request, position)

    def _slot(self, request: Request, position: int) -> tuple[int, int]:
        page, offset = divmod(position, self.cache.page_size)
        return request.pages[page], offset

    def _content(self, request: Request, position: int) -> Content:
        return self.epoch, request.lora, tuple(request.tokens[: position + 1])

    def _draw(self, request: Request) -> None:
        if BROKEN in request.tokens:
            self.cache.forget(request.pages)
            self._end(request, {"type": "abort", "message": "not finite"})
            return
        if request.max_new_tokens:
            request.record(next_token(request.tokens, request), str(self.epoch))
        if request.tokens[-1] == STOP and request.output_len:
            self._end(request, {"type": "stop", "matched": STOP})
        elif request.output_len == request.max_new_tokens:
            self._end(request, {"type": "length", "length": request.output_len})

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        self.ended.append(request)
        self.scheduler.remove(request)
        assert request.pages == [] and request.leader is None and request.followers == []
        output = expected_output(request)
        if reason["type"] == "abort":
            output = output[: request.output_len]
        assert request.output_ids == output, "tokens were lost, or drawn from something else"
        start = request.wants.prompt_start
        if start >= 0 and (reason["type"] != "abort" or request.output_len):
            positions: Any = request.prompt_logprobs
            assert [at for _, at in positions] == list(range(start, request.prompt_len - 1))
            assert len({epoch for epoch, _ in positions}) <= 1, "prompt logprobs of two sets of weights"


@pytest.fixture(scope="session")
def simulation() -> type[Simulation]:
    return Simulation


@pytest.fixture(scope="session")
def new_request() -> Callable[..., Request]:
    return make_request


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with seven merges: most characters beyond ASCII are several tokens, and some tokens end
    within one. Ids 0 and 1 are special; `len(tokenizer)` and above are unknown."""
    # Bytes as this kind of tokenizer spells them: a space, the first two of an emoji, the first of 漢, ...
    merges = ["Ġ ð", "Ġð Ł", "a æ", "Ń Ĺ", "Ã ©", "t h", "th e"]
    pairs = [(left, right) for left, right in map(str.split, merges)]
    pieces = ["<s>", "</s>", *sorted(ByteLevel.alphabet()), *map("".join, pairs)]
    raw = Tokenizer(BPE({piece: number for number, piece in enumerate(pieces)}, pairs))
    raw.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
