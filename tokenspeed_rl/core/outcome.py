"""What a step brought, written into its requests. Under the loop's lock.

One that was aborted while the step ran is final, and gets nothing; its forks get what it would have got.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tokenspeed_rl.core.model_runner import StepOutcome
from tokenspeed_rl.core.request import FinishReason, Request
from tokenspeed_rl.core.sampler import NOT_FINITE, Sample
from tokenspeed_rl.core.stop import check_stop


def take_prompt_logprobs(outcome: StepOutcome, forks: Mapping[Request, Request]) -> None:
    """Logprobs of the prompt tokens that the step passed; a fork has those of its leader."""
    fresh = dict(outcome.prompt_logprobs)
    for fork, leader in forks.items():
        if fork.wants.prompt_start >= 0:
            fork.prompt_logprobs = [*leader.prompt_logprobs, *fresh.get(leader, ())]
    for request, values in fresh.items():
        if not request.finished:
            request.prompt_logprobs += values


def take_readings(outcome: StepOutcome, forks: Mapping[Request, Request]) -> None:
    """What was read in the step; a fork has its leader's values."""
    fresh = dict(outcome.readings)
    for fork, leader in forks.items():
        if fork.wants.reading == "values":
            fork.readings = [*leader.readings, *fresh[leader]]
    for request, rows in fresh.items():
        if not request.finished:
            request.readings += rows


def take_routes(outcome: StepOutcome, forks: Mapping[Request, Request]) -> None:
    """Experts of the tokens that the step computed; a fork has those of its leader."""
    fresh = dict(outcome.routes)
    for fork, leader in forks.items():
        if fork.wants.routed_experts:
            fork.routes = [*leader.routes, *fresh.get(leader, ())]
    for request, rows in fresh.items():
        if not request.finished:
            request.routes += rows


def reason_to_end_reading(request: Request) -> FinishReason:
    """How a request ends whose reading is complete: as one that asked for no token, unless what it read is
    no number; then it has read nothing."""
    if all(math.isfinite(value) for row in request.readings for value in row):
        return {"type": "length", "length": 0}
    what = "scores" if request.wants.labels else "hidden states"
    request.readings = []
    return {"type": "abort", "message": f"the model's {what} are not finite"}


def fault_of(request: Request, drawn: Sample) -> str | None:
    """Why nothing can be drawn for this request, in words; None: it can."""
    if request.output_len == 0 and not all(map(math.isfinite, request.prompt_logprobs)):
        return NOT_FINITE  # with a sliding window the last position may not see it
    return drawn.fault


def take_draw(request: Request, drawn: Sample, version: str, hidden: list[float] | None) -> None:
    """Append a drawn token and all that was asked for with it."""
    request.record(drawn.token, version)
    for kind, value in drawn.logprobs.items():
        request.logprobs.setdefault(kind, []).append(value)
    if request.wants.top:
        request.top_logprobs.append(drawn.top)
    if request.wants.token_ids:
        request.ids_logprobs.append(drawn.ids)
    if request.wants.sampling_mask:
        request.masks.append(drawn.mask)
    if hidden is not None:
        request.hidden_states.append(hidden)


def reason_to_end(request: Request, tokenizer: Any) -> FinishReason | None:
    """Why a request ends after its last token; None: it goes on."""
    if request.max_new_tokens == 0:
        return {"type": "length", "length": 0}
    try:
        return check_stop(request, tokenizer)
    except Exception as error:  # the caller's tokenizer: what it raises is this request's alone
        return {"type": "abort", "message": f"the tokenizer failed: {type(error).__name__}: {error}"}
