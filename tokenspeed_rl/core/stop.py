"""When a sample ends."""

from typing import Any

from tokenspeed_rl.core.request import FinishReason, Request
from tokenspeed_rl.core.text import IncrementalText, find_stop


def check_stop(request: Request, tokenizer: Any) -> FinishReason | None:
    """Why the request ends with its last token, or None: a stop id, then a stop string, then the length."""
    params, token = request.params, request.tokens[-1]
    matched = _match_string(request, tokenizer) if params.stop else None
    if token in request.stop_ids:
        return {"type": "stop", "matched": token}
    if matched is not None:
        return {"type": "stop", "matched": matched}
    if request.output_len >= request.max_new_tokens:
        return {"type": "length", "length": request.output_len}
    return None


def _match_string(request: Request, tokenizer: Any) -> str | None:
    if request.text is None:
        request.text = IncrementalText(tokenizer, request.params.skip_special_tokens)
    since = len(request.text.text)
    hit = find_stop(request.text.push(request.tokens[-1:]), tuple(request.params.stop or ()), since)
    if hit is None or request.output_len < request.params.min_new_tokens:
        return None
    request.stop_at, matched = hit
    return matched
