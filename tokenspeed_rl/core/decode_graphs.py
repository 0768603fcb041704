"""Steps in which every row decodes, captured once per number of rows and replayed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed_rl.cache.kv_cache import KVCache
from tokenspeed_rl.core.batch import StepPlan
from tokenspeed_rl.core.capture import Capture
from tokenspeed_rl.core.decode_rows import DecodeRows, bucket_for
from tokenspeed_rl.core.decode_step import KINDS, DecodeStep
from tokenspeed_rl.core.request import Request
from tokenspeed_rl.core.sampler import NOT_FINITE, Sample, is_adjusted
from tokenspeed_rl.models import Decoder
from tokenspeed_rl_kernels.decode_work import Sharing
from tokenspeed_rl_kernels.step_decode import StepDecode, rows_per_read

MOST_FAILURES = 3
"""Captures in a row that may fail before no more is tried."""
LEAST_CONTEXT = 1024
"""Tokens that a row has room for at least."""


@dataclass(frozen=True, slots=True)
class _Bound:
    """What captured steps have the addresses of."""

    bindings: int
    """Of the weights, see `WeightStore.bindings`."""
    keys: int
    """Address of the first layer's keys."""
    angles: Tensor
    context: int
    """Tokens that a row has room for."""

    def still(self, bindings: int, keys: int, angles: Tensor, need: int) -> bool:
        """Whether steps captured so serve rows of up to `need` tokens."""
        same = (self.bindings, self.keys) == (bindings, keys) and self.angles is angles
        return same and need <= self.context


class DecodeGraphs:
    """Replays decode steps of one model. The loop's thread owns it."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        capture: Capture,
        *,
        device: torch.device,
        max_rows: int,
        context: int,
        bindings: Callable[[], int],
        log: logging.Logger,
    ) -> None:
        """`context` is the most tokens of a request; `bindings` counts how often the weights have moved."""
        self._decoder = decoder
        self._kv = kv
        self._capture = capture
        self._device = device
        self._max_rows = max_rows
        self._context = context
        self._bindings = bindings
        self._log = log
        self._bound: _Bound | None = None
        self._steps: dict[int, tuple[DecodeStep, Callable[[], None]]] = {}
        self._rows: DecodeRows | None = None
        self._decode: StepDecode | None = None
        self._failures = 0

    @property
    def nbytes(self) -> int:
        """Bytes of inputs, scratch and captured work."""
        held = [part.nbytes for part in (self._rows, self._decode) if part is not None]
        return sum(held) + self._capture.nbytes

    def takes(self, plan: StepPlan) -> bool:
        """Whether the plan's step is one that can be replayed."""
        if (
            self._failures >= MOST_FAILURES
            or plan.chunks
            or not plan.decodes
            or len(plan.decodes) > self._max_rows
        ):
            return False
        return all(map(_is_plain, plan.decodes))

    def run(self, requests: Sequence[Request]) -> list[Sample] | None:
        """Compute the next token of each; None: this can't be captured, and nothing was changed."""
        bucket = bucket_for(len(requests), self._max_rows)
        found = self._step(bucket, max(r.prompt_len + r.max_new_tokens for r in requests))
        if found is None or self._rows is None:
            return None
        step, replay = found
        rows = self._rows.place(requests, bucket)
        replay()
        drawn, logprobs = step.tokens.tolist(), step.logprobs.tolist()
        self._rows.advanced(rows, [drawn[row] for row in rows])
        return [
            _sample(request, drawn[row], [kind[row] for kind in logprobs])
            for request, row in zip(requests, rows, strict=True)
        ]

    def release(self) -> None:
        """Give up all that was captured, with its inputs: it is made anew when it is needed."""
        self._steps, self._rows, self._decode, self._bound = {}, None, None, None
        self._capture.close()

    def _step(self, bucket: int, need: int) -> tuple[DecodeStep, Callable[[], None]] | None:
        """The step of so many rows, of up to `need` tokens each."""
        bindings, keys, angles = (
            self._bindings(),
            self._kv.k[0].data_ptr(),
            self._decoder.angles(self._context),
        )
        if self._bound is None or not self._bound.still(bindings, keys, angles, need):
            self.release()
            # Scratch grows with the context: what nobody asks for takes none.
            room = min(self._context, max(LEAST_CONTEXT, 1 << (need - 1).bit_length()))
            self._bound = _Bound(bindings, keys, angles, room)
        if bucket not in self._steps:
            try:
                self._steps[bucket] = self._captured(bucket, self._bound.context)
            except RuntimeError as error:  # no memory, or somebody synchronised the device
                self._failures += 1
                self.release()
                self._log.warning("a decode step was not captured, and runs as others do", exc_info=error)
                return None
            self._failures = 0
        return self._steps[bucket]

    def _captured(self, bucket: int, context: int) -> tuple[DecodeStep, Callable[[], None]]:
        if self._rows is None or self._decode is None:
            self._rows, self._decode = self._room_for(context)
        self._rows.clear()  # what is run to capture it changes no one's
        kv = self._kv.reach()  # a wake may map more pages than there are now
        step = DecodeStep(self._decoder, kv, self._rows, self._decode, rows=bucket, context=context)
        return step, self._capture(step)

    def _room_for(self, context: int) -> tuple[DecodeRows, StepDecode]:
        """Inputs and scratch, which the steps of all buckets share."""
        size, heads, caches = self._kv.page_size, self._decoder.spec.num_heads, (self._kv.k[0], self._kv.v[0])
        pages = min(-(-context // size), self._kv.max_pages)
        together = rows_per_read(heads, caches)
        rows = DecodeRows(self._max_rows, pages, size, self._device, rows_per_read=together)
        sharing = Sharing(rows.order.device, rows.prefix_lens.device, rows.leads.device)
        return rows, StepDecode.empty(rows.pages.device, rows.lens.device, sharing, heads, caches)


def _is_plain(request: Request) -> bool:
    """Whether a captured step knows all that the request needs: no adapter, no penalty, bias or ban, nothing
    but tokens and their logprobs."""
    wants = request.wants
    extras = wants.top or wants.token_ids or wants.sampling_mask or wants.hidden_states
    return not (extras or request.lora or request.spared or is_adjusted(request))


def _sample(request: Request, token: int, logprobs: Sequence[float]) -> Sample:
    if token < 0:
        return Sample(-1, NOT_FINITE)
    wants, known = request.wants, dict(zip(KINDS, logprobs, strict=True))
    return Sample(token, logprobs={kind: known[kind] for kind in wants.kinds} if wants.logprob else {})
