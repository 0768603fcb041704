"""What a model makes of a whole sequence, without cache or batch mates: the engine's decoder, or a trainer's
module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tokenspeed_rl.cache.kv_cache import KVLayout, LooseKV
from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.layers.forward_batch import ForwardBatch
from tokenspeed_rl.layers.lora import AdaptedRows
from tokenspeed_rl.models import Decoder
from tokenspeed_rl.weights.adapters import Adapter

_ROWS = 256
"""Positions whose logits exist at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """What was computed of one sequence."""

    logprobs: list[float]
    """Of the tokens from the asked start on, each given all before it."""
    top: list[list[tuple[float, int]]]
    """The most likely (logprob, id) at those places, best first."""
    streams: list[Tensor]
    """[T, hidden_size] float32 on the CPU: the embedding, the residual stream after each layer but the last,
    and the final norm's output."""


def recompute_decoder(
    decoder: Decoder,
    layout: KVLayout,
    ids: Sequence[int],
    start: int,
    *,
    temperature: float,
    top: int,
    adapter: Adapter | None = None,
) -> Recomputed:
    """By the engine's decoder, over keys and values of its own. On the loop's thread.

    Args:
        layout: of the engine's KV cache.
        ids: the sequence.
        start: of the tokens to be told about, at least 1.
        temperature: of the logprobs; 0 is 1.
        top: how many most likely tokens to tell at each place.
        adapter: to compute it with; None: the base model.
    """
    device = decoder.device
    pages = -(-len(ids) // layout.page_size)
    shape = (layout.num_layers, pages, *layout.page_shape)
    keys, values = (torch.zeros(shape, dtype=layout.dtype, device=device) for _ in range(2))
    streams: list[Tensor] = []
    batch = _one_prompt(ids, pages, device)
    batch.adapted = () if adapter is None else (AdaptedRows(adapter, None),)
    hidden = decoder.forward(batch, LooseKV(tuple(keys), tuple(values)), streams=streams)
    logprobs: list[float] = []
    best: list[list[tuple[float, int]]] = []
    for begin in range(start - 1, len(ids) - 1, _ROWS):
        end = min(begin + _ROWS, len(ids) - 1)
        some = _told(decoder.logits(hidden[begin:end]), ids[begin + 1 : end + 1], temperature, top)
        logprobs += some[0]
        best += some[1]
    return Recomputed(logprobs=logprobs, top=best, streams=streams)


def recompute_module(
    module: nn.Module, ids: Sequence[int], start: int, *, temperature: float, top: int
) -> Recomputed:
    """By a transformers causal LM (or a wrapper of one), in eval mode for the time, under the caller's
    autocast. Arguments as for `recompute_decoder`.

    Raises:
        RequestError: it does not return logits and hidden states as transformers' causal LMs do.
    """
    first = next(module.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    with _evaluating(module), torch.no_grad():
        outputs: Any = module(
            input_ids=torch.tensor([list(ids)], device=device), use_cache=False, output_hidden_states=True
        )
    logits, hidden = getattr(outputs, "logits", None), getattr(outputs, "hidden_states", None)
    if not isinstance(logits, Tensor) or not hidden:
        raise RequestError(
            "module must return logits and hidden states as a transformers causal LM does",
            got=type(module).__name__,
            fix="Pass the policy itself.",
        )
    told = _told(logits[0, start - 1 : len(ids) - 1], ids[start:], temperature, top)
    streams = [layer[0].detach().to("cpu", torch.float32) for layer in hidden]
    return Recomputed(logprobs=told[0], top=told[1], streams=streams)


def _told(
    logits: Tensor, targets: Sequence[int], temperature: float, top: int
) -> tuple[list[float], list[list[tuple[float, int]]]]:
    logprobs = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    rows = torch.arange(len(targets), device=logits.device)
    found = logprobs[rows, torch.tensor(list(targets), device=logits.device)].tolist()
    values, ids = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
    best = [list(zip(v, i, strict=True)) for v, i in zip(values.tolist(), ids.tolist(), strict=True)]
    return found, best


def _one_prompt(ids: Sequence[int], pages: int, device: torch.device) -> ForwardBatch:
    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    places = torch.arange(len(ids), device=device)
    return ForwardBatch(
        token_ids=torch.tensor(list(ids), device=device),
        positions=places,
        length=len(ids),
        slots=places,
        num_decode=0,
        decode_pages=torch.zeros(0, 0, dtype=torch.int32, device=device),
        decode_lens=ints(),
        shared=None,
        prefill_pages=torch.arange(pages, dtype=torch.int32, device=device).unsqueeze(0),
        prefill_starts=ints(0, len(ids)),
        prefill_lens=ints(len(ids)),
    )


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    training = [part for part in module.modules() if part.training]
    try:
        for part in training:
            part.training = False
        yield
    finally:
        for part in training:
            part.training = True
