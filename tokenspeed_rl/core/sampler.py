"""From logits to tokens and their logprobs, for all rows of a step at once.

Three distributions of a row, each a log-softmax:

- raw: of the logits as the model gave them;
- sampling: of logits / temperature;
- processed: what is drawn from, in this order: repetition, frequency and presence penalties, bias, bans
  (ids that would end a sample too early), temperature, top-k, top-p, min-p.

At temperature 0 the draw is the processed argmax (lowest id on ties) and all three kinds are the raw ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokenspeed_rl.core.request import Request
from tokenspeed_rl.requests import LOGPROB_KINDS
from tokenspeed_rl_kernels.filters import filter_logits
from tokenspeed_rl_kernels.sample import argmax, block_logsumexp, draw, scale_logits, token_logprob

NOT_FINITE = "the model's logits are not finite"


@dataclass(slots=True)
class Sample:
    """What was drawn for one request. `token` is -1, and `fault` says why, where nothing could be drawn."""

    token: int
    fault: str | None = None
    logprobs: dict[str, float] = field(default_factory=dict)
    top: list[tuple[float, int]] = field(default_factory=list)
    ids: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)


def sample(logits: Tensor, requests: Sequence[Request]) -> list[Sample]:
    """Draw one token per row of `logits` [N, V] float32 for the request of that row."""
    # Dtypes are said: the process's default is the trainer's, and bfloat16 knows no 0.7.
    heats = [r.params.temperature for r in requests]
    temperature = torch.tensor(heats, dtype=torch.float32, device=logits.device)
    greedy = temperature == 0
    adjusted = adjust(logits, requests)
    sampling = scale_logits(logits, temperature)
    scaled = sampling if adjusted is logits else scale_logits(adjusted, temperature)
    processed = _filter(scaled, requests)
    blocks = block_logsumexp(sampling)
    processed_blocks = blocks if processed is sampling else block_logsumexp(processed)
    tokens = _draw(processed, processed_blocks, adjusted, greedy, requests)

    by_kind = dict.fromkeys(LOGPROB_KINDS, token_logprob(sampling, tokens, blocks))
    if processed is not sampling:
        drawn_from = token_logprob(processed, tokens, processed_blocks)
        by_kind["processed"] = torch.where(greedy, by_kind["sampling"], drawn_from)
    if sampling is not logits and any("raw" in r.wants.kinds for r in requests):
        by_kind["raw"] = token_logprob(logits, tokens, block_logsumexp(logits))

    samples = [Sample(token) for token in tokens.tolist()]
    values = {kind: tensor.tolist() for kind, tensor in by_kind.items()}
    for row, (request, result) in enumerate(zip(requests, samples, strict=True)):
        if request.wants.logprob:
            result.logprobs = {kind: values[kind][row] for kind in request.wants.kinds}
    total = blocks.logsumexp(1)
    _mark_faults(samples, total, processed_blocks.logsumexp(1))
    _add_extras(samples, requests, sampling, total, processed)
    return samples


def adjust(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Penalties, bias and bans applied to the rows that have any; the same tensor if none has."""
    rows = [row for row, request in enumerate(requests) if is_adjusted(request)]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        _adjust_row(logits[row], requests[row])
    return logits


def is_adjusted(request: Request) -> bool:
    """Whether penalties, bias or bans change the request's logits at its next draw."""
    p = request.params
    penalised = p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0
    return penalised or bool(p.logit_bias) or request.output_len < p.min_new_tokens


def _adjust_row(row: Tensor, request: Request) -> None:
    p, device = request.params, row.device
    if p.repetition_penalty != 1:
        seen = torch.tensor(request.tokens, device=device).unique()
        values = row[seen]
        row[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if (p.frequency_penalty or p.presence_penalty) and request.output_len:
        ids, counts = torch.tensor(request.output_ids, device=device).unique(return_counts=True)
        row[ids] -= p.frequency_penalty * counts.to(row.dtype) + p.presence_penalty
    if p.logit_bias:
        ids = torch.tensor(list(p.logit_bias), device=device)
        row[ids] += torch.tensor(list(p.logit_bias.values()), dtype=row.dtype, device=device)
    if request.output_len < p.min_new_tokens and request.banned_ids:
        row[torch.tensor(request.banned_ids, device=device)] = -torch.inf


def _filter(scaled: Tensor, requests: Sequence[Request]) -> Tensor:
    params = [r.params for r in requests]
    if not any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0) for p in params):
        return scaled
    off = [p.temperature == 0 for p in params]
    device = scaled.device
    top_k = [-1 if o else p.top_k for p, o in zip(params, off, strict=True)]
    top_p = [1.0 if o else p.top_p for p, o in zip(params, off, strict=True)]
    min_p = [0.0 if o else p.min_p for p, o in zip(params, off, strict=True)]
    return filter_logits(
        scaled,
        torch.tensor(top_k, device=device),
        torch.tensor(top_p, dtype=torch.float32, device=device),
        torch.tensor(min_p, dtype=torch.float32, device=device),
    )


def _draw(
    processed: Tensor, blocks: Tensor, adjusted: Tensor, greedy: Tensor, requests: Sequence[Request]
) -> Tensor:
    if bool(greedy.all()):
        return argmax(adjusted)
    seeds = torch.tensor([r.draw_seed for r in requests], device=processed.device)
    positions = torch.tensor([len(r.tokens) for r in requests], device=processed.device)
    tokens = draw(processed, seeds, positions, blocks=blocks)
    return torch.where(greedy, argmax(adjusted), tokens) if bool(greedy.any()) else tokens


def _mark_faults(samples: list[Sample], sampling_total: Tensor, processed_total: Tensor) -> None:
    fine = torch.isfinite(sampling_total) & torch.isfinite(processed_total)
    if bool(fine.all()):
        return
    for result, finite, possible in zip(
        samples,
        torch.isfinite(sampling_total).tolist(),
        torch.isfinite(processed_total).tolist(),
        strict=True,
    ):
        if not finite:
            result.token, result.fault = -1, NOT_FINITE
        elif not possible:
            result.token, result.fault = -1, "bias and bans leave no token to draw"


def _add_extras(
    samples: list[Sample], requests: Sequence[Request], sampling: Tensor, total: Tensor, processed: Tensor
) -> None:
    for row, (request, result) in enumerate(zip(requests, samples, strict=True)):
        wants = request.wants
        if wants.top:
            values, ids = sampling[row].topk(min(wants.top, sampling.shape[1]))
            result.top = list(zip((values - total[row]).tolist(), ids.tolist(), strict=True))
        if wants.token_ids:
            ids = torch.tensor(wants.token_ids, device=sampling.device)
            result.ids = (sampling[row, ids] - total[row]).tolist()
        if wants.sampling_mask:
            greedy = request.params.temperature == 0
            kept = processed[row].isfinite().nonzero()[:, 0].tolist()
            result.mask = [result.token] if greedy else kept
