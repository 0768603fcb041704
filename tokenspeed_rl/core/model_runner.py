"""Runs one plan: tensors in, a forward over the paged cache, draws out. Decides nothing about scheduling."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenspeed_rl.cache.kv_cache import KVCache
from tokenspeed_rl.core.batch import Chunk, StepPlan
from tokenspeed_rl.core.decode_graphs import DecodeGraphs
from tokenspeed_rl.core.prefix_groups import prefix_groups
from tokenspeed_rl.core.reader import Rows, read
from tokenspeed_rl.core.request import Request
from tokenspeed_rl.core.routing import count_experts, read_rows, rows_asked_for
from tokenspeed_rl.core.sampler import Sample, sample
from tokenspeed_rl.layers.forward_batch import ForwardBatch
from tokenspeed_rl.layers.lora import AdaptedRows
from tokenspeed_rl.models import Decoder
from tokenspeed_rl.weights.adapters import Adapter
from tokenspeed_rl_kernels.sample import block_logsumexp, scale_logits, token_logprob

PROMPT_LOGPROB_ROWS = 256
"""Prompt positions whose logits exist at once: [rows, vocab] float32 is the largest tensor of a step."""


@dataclass(slots=True)
class StepOutcome:
    """What a step brought: draws per request, logprobs of the prompt tokens it passed, and what was read."""

    draws: list[tuple[Request, Sample]]
    prompt_logprobs: list[tuple[Request, list[float]]]
    hidden_states: dict[Request, list[float]]
    readings: list[tuple[Request, Rows]]
    expert_counts: npt.NDArray[np.int64] | None = None
    """[layers with experts, E]: how many tokens each expert computed, where `ModelRunner.counts_experts`."""
    routes: list[tuple[Request, list[npt.NDArray[np.int16]]]] = field(default_factory=list)
    """Of requests that ask: the experts [layers, k] of each of their tokens whose experts weren't known."""


class ModelRunner:
    """The decoder, its cache and the sampler on one device. Used by the loop's thread under
    `torch.no_grad`."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        device: torch.device,
        adapters: Callable[[], Mapping[str, Adapter]] = dict,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """`adapters` has those that requests ask for, as of now; `graphs` replays what steps it can."""
        self._graphs = graphs
        self._adapters = adapters
        self.decoder = decoder
        self.kv = kv
        self.device = device
        self.counts_experts = False
        """Whether the next step counts how many tokens each expert computes."""

    def run(self, plan: StepPlan) -> StepOutcome:
        """Compute the plan's tokens and draw for every request that is due one."""
        graphs = None if self.counts_experts else self._graphs
        if graphs is not None and graphs.takes(plan) and (samples := graphs.run(plan.decodes)) is not None:
            return StepOutcome(list(zip(plan.decodes, samples, strict=True)), [], {}, [])
        spec, spans = self.decoder.spec, plan.spans
        asked = [] if spec.experts is None else rows_asked_for(spans)
        routes: list[Tensor] | None = [] if asked or self.counts_experts else None
        hidden = self.decoder.forward(self._batch(plan, spans), self.kv, routes=routes)
        outcome = self._outcome(plan, hidden)
        if routes and asked:
            outcome.routes = read_rows(routes, asked, spec)
        if routes and self.counts_experts and spec.experts is not None:
            outcome.expert_counts = count_experts(routes, spec.experts)
        return outcome

    def _outcome(self, plan: StepPlan, hidden: Tensor) -> StepOutcome:
        """Draws, and what was asked for beside them."""
        self.kv.copy_pages(plan.copies)
        prompt_logprobs = self._prompt_logprobs(plan, hidden)
        readings = read(plan, hidden, self.decoder)
        rows, requests = self._due(plan)
        if not rows:
            return StepOutcome([], prompt_logprobs, {}, readings)
        ends = hidden[torch.tensor(list(dict.fromkeys(rows)), device=self.device)]
        logits = self.decoder.logits(ends)
        place = {row: number for number, row in enumerate(dict.fromkeys(rows))}
        if len(place) < len(rows):  # forks draw from their leader's row
            logits = logits[torch.tensor([place[row] for row in rows], device=self.device)]
        draws = list(zip(requests, sample(logits, requests), strict=True))
        states = {
            request: ends[place[row]].float().tolist()
            for row, request in zip(rows, requests, strict=True)
            if request.wants.hidden_states
        }
        return StepOutcome(draws, prompt_logprobs, states, readings)

    def _due(self, plan: StepPlan) -> tuple[list[int], list[Request]]:
        """Which requests draw after this step, each with its row of the hidden states.

        Those that only score their prompt are among them: their logits too must be finite.
        """
        rows, requests = list(range(len(plan.decodes))), list(plan.decodes)
        end = len(plan.decodes)
        for chunk in plan.chunks:
            end += chunk.count
            if not chunk.completes:
                continue
            drawing = [request for request in plan.sharers(chunk) if request.wants.reading is None]
            rows += [end - 1] * len(drawing)
            requests += drawing
        return rows, requests

    def _batch(self, plan: StepPlan, spans: Sequence[Chunk]) -> ForwardBatch:
        size = self.kv.page_size
        tokens = np.concatenate([_array(c.request.tokens[c.start : c.start + c.count]) for c in spans])
        positions = np.concatenate([np.arange(c.start, c.start + c.count) for c in spans])
        slots = np.concatenate([_slots(c, size) for c in spans])
        chunks = plan.chunks
        return ForwardBatch(
            token_ids=self._put(tokens),
            positions=self._put(positions),
            length=int(positions.max()) + 1,
            slots=self._put(slots),
            num_decode=len(plan.decodes),
            decode_pages=self._table(plan.decodes, [r.computed + 1 for r in plan.decodes]),
            decode_lens=self._ints(r.computed + 1 for r in plan.decodes),
            shared=self._shared_prefixes(plan.decodes),
            prefill_pages=self._table([c.request for c in chunks], [c.start + c.count for c in chunks]),
            prefill_starts=self._ints(np.cumsum([0, *(c.count for c in chunks)]).tolist()),
            prefill_lens=self._ints(c.start + c.count for c in chunks),
            adapted=self._adapted(spans),
        )

    def _adapted(self, spans: Sequence[Chunk]) -> tuple[AdaptedRows, ...]:
        """The step's rows by adapter; those of the base model are in none."""
        if not any(span.request.lora for span in spans):
            return ()
        start, rows = 0, dict[str | None, list[npt.NDArray[np.int64]]]()
        for span in spans:
            rows.setdefault(span.request.lora, []).append(np.arange(start, start + span.count))
            start += span.count
        adapters = self._adapters()
        return tuple(
            AdaptedRows(adapters[name], None if len(rows) == 1 else self._put(np.concatenate(its_rows)))
            for name, its_rows in rows.items()
            if name is not None
        )

    def _shared_prefixes(self, decodes: Sequence[Request]) -> tuple[Tensor, Tensor, Tensor] | None:
        """As `ForwardBatch.shared`."""
        groups = prefix_groups(decodes, self.kv.page_size)
        if not groups:
            return None
        group_of_row = [-1] * len(decodes)
        for number, group in enumerate(groups):
            for row in group.rows:
                group_of_row[row] = number
        width = max(len(group.pages) for group in groups)
        pages = np.array([g.pages + (0,) * (width - len(g.pages)) for g in groups], dtype=np.int32)
        prefix_lens = self._ints(len(group.pages) * self.kv.page_size for group in groups)
        return self._put(pages), prefix_lens, self._ints(group_of_row)

    def _prompt_logprobs(self, plan: StepPlan, hidden: Tensor) -> list[tuple[Request, list[float]]]:
        found = []
        offset = len(plan.decodes)
        for chunk in plan.chunks:
            request, begin = chunk.request, max(chunk.start, chunk.request.wants.prompt_start)
            end = min(chunk.start + chunk.count, request.prompt_len - 1)
            if request.wants_prompt_logprobs and begin < end:
                rows = hidden[offset + begin - chunk.start : offset + end - chunk.start]
                targets = request.tokens[begin + 1 : end + 1]
                found.append((request, self._logprobs_of(rows, targets, request.params.temperature)))
            offset += chunk.count
        return found

    def _logprobs_of(self, hidden: Tensor, targets: list[int], temperature: float) -> list[float]:
        """Logprobs of `targets` at the rows of `hidden`, at the request's temperature (raw at 0)."""
        result: list[float] = []
        for start in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            part = hidden[start : start + PROMPT_LOGPROB_ROWS]
            ids = torch.tensor(targets[start : start + PROMPT_LOGPROB_ROWS], device=self.device)
            heat = torch.full((len(ids),), temperature, dtype=torch.float32, device=self.device)
            logits = scale_logits(self.decoder.logits(part), heat)
            result += token_logprob(logits, ids, block_logsumexp(logits)).tolist()
        return result

    def _table(self, requests: Sequence[Request], lengths: Sequence[int]) -> Tensor:
        """Pages [len(requests), n] int32 that hold the first `lengths` tokens of each request, 0 behind
        them."""
        counts = [-(-length // self.kv.page_size) for length in lengths]
        table = np.zeros((len(requests), max(counts, default=0)), dtype=np.int32)
        for row, (request, count) in enumerate(zip(requests, counts, strict=True)):
            table[row, :count] = request.pages[:count]
        return self._put(table)

    def _ints(self, values: Iterable[int]) -> Tensor:
        return self._put(np.fromiter(values, dtype=np.int32))

    def _put(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _slots(chunk: Chunk, size: int) -> npt.NDArray[np.int64]:
    """Where each token's KV goes; -1: nowhere, as it is in a page that another request has written, or does.
    What isn't finite would spoil it for all."""
    at, request = np.arange(chunk.start, chunk.start + chunk.count), chunk.request
    slots = _array(request.pages)[at // size] * size + at % size
    if request.spared:
        slots[np.isin(at // size, request.spared)] = -1
    return slots


def _array(values: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.asarray(values, dtype=np.int64)
