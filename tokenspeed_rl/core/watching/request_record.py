"""A sample that ended, in words for a log and as a record for a dump."""

from __future__ import annotations

import dataclasses
from typing import Any

from tokenspeed_rl.core.output import final_text, result
from tokenspeed_rl.core.request import Request
from tokenspeed_rl.core.seeds import seed_of
from tokenspeed_rl.core.text import decode
from tokenspeed_rl.errors import shorten
from tokenspeed_rl.sampling_params import SamplingParams

_DEFAULTS = dataclasses.asdict(SamplingParams())


def describe(request: Request, level: int, tokenizer: Any) -> str:
    """One line: ids and counts (level 0), also sampling parameters (1), also prompt and output, shortened
    (2)."""
    reason = request.finish_reason or {}
    parts = [
        f"request {request.rid!r}[{request.index}]: {request.prompt_len} prompt tokens, "
        f"{request.cached_tokens or 0} of them cached, {request.output_len} output tokens",
        " ".join(str(reason[key]) for key in ("type", "matched", "message") if key in reason),
        f"{request.finished_at - request.created:.3f} s",
    ]
    if level >= 1:
        given = dataclasses.asdict(request.params)
        changed = [f"{name}={value!r}" for name, value in given.items() if value not in (_DEFAULTS[name], ())]
        parts.append(f"sampling: {' '.join(changed) or 'defaults'}")
    if level >= 2:
        ids = request.tokens[: request.prompt_len]
        prompt: object = ids if tokenizer is None else decode(tokenizer, ids, False)
        output: object = request.output_ids if tokenizer is None else final_text(request, tokenizer)
        parts += [f"prompt: {shorten(prompt)}", f"output: {shorten(output)}"]
    return ", ".join(parts)


def record(request: Request, tokenizer: Any) -> dict[str, Any]:
    """All that a replay needs, and what came out as callers got it; JSON-serialisable.

    `seed` is the request seed with which a request of one sample draws what this one drew; `max_new_tokens`
    what the sampling parameters, the context and the KV cache together allowed.
    """
    return {
        "rid": request.rid,
        "index": request.index,
        "input_ids": request.tokens[: request.prompt_len],
        "sampling_params": dataclasses.asdict(request.params),
        "seed": seed_of(request.draw_seed),
        "max_new_tokens": request.max_new_tokens,
        "priority": request.priority,
        "wants": dataclasses.asdict(request.wants),
        **result(request, tokenizer),
    }
