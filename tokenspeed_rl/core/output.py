"""A request's progress as the dict that callers get."""

import time
from collections.abc import Sequence
from typing import Any

from tokenspeed_rl.core.request import Request
from tokenspeed_rl.core.text import IncrementalText, decode, without_partial_stop

Triple = tuple[float | None, int, str | None]


def result(request: Request, tokenizer: Any, *, start: int = 0, text: str | None = None) -> dict[str, Any]:
    """Output tokens from `start` on, with all that was asked for; counts, spans and text are cumulative.

    `text` None: the final text. Call it under the loop's lock unless the request is finished.
    """
    version = request.spans[-1].version if request.spans else ""
    meta: dict[str, Any] = {
        "id": request.rid,
        "index": request.index,
        "prompt_index": request.prompt_index,
        "finish_reason": request.finish_reason,
        "prompt_tokens": request.prompt_len + request.wants.padding,
        "completion_tokens": request.output_len,
        "cached_tokens": request.cached_tokens or 0,
        "weight_version": version,
        "weight_versions": [{"version": s.version, "start": s.start, "end": s.end} for s in request.spans],
        "e2e_latency": (request.finished_at if request.finished else time.monotonic()) - request.created,
    }
    if request.wants.reading is not None:
        return {**_reading(request), "meta_info": meta}
    ids = request.tokens[request.prompt_len + start :]
    if request.finished:
        meta["prompt_ids"] = request.tokens[: request.prompt_len]
    meta.update(_asked_for(request, tokenizer, ids, start))
    return {
        "text": final_text(request, tokenizer) if text is None else text,
        "output_ids": ids,
        "meta_info": meta,
    }


def _reading(request: Request) -> dict[str, Any]:
    """An embedding or a score; of an aborted request what it has: none, or the values of the tokens before.

    A score is a number where the model has one label, else a list of them; values are a list of scores.
    """
    wants, rows = request.wants, request.readings
    if wants.reading == "embedding":
        return {"embedding": rows[0] if rows else []}
    scores: list[Any] = [row[0] for row in rows] if wants.labels == 1 else rows
    return {"score": scores if wants.reading == "values" else scores[0] if scores else None}


def _asked_for(request: Request, tokenizer: Any, ids: Sequence[int], start: int) -> dict[str, Any]:
    wants, shown = request.wants, tokenizer if request.wants.text else None
    found: dict[str, Any] = {} if request.lora is None else {"lora": request.lora}
    if wants.logprob:
        for kind in wants.kinds:
            name = "output_token_logprobs" if kind == "sampling" else f"output_token_logprobs_{kind}"
            found[name] = _triples(request.logprobs.get(kind, [])[start:], ids, shown)
        if wants.prompt_start >= 0:
            prompt = request.tokens[wants.prompt_start : request.prompt_len]
            known: list[float | None] = [None, *request.prompt_logprobs]
            found["input_token_logprobs"] = _triples(known, prompt[: len(known)], shown)
        if wants.top:
            found["output_top_logprobs"] = [
                _triples([value for value, _ in top], [token for _, token in top], shown)
                for top in request.top_logprobs[start:]
            ]
        if wants.token_ids:
            found["output_token_ids_logprobs"] = [
                _triples(values, wants.token_ids, shown) for values in request.ids_logprobs[start:]
            ]
    if wants.sampling_mask:
        found["sampling_mask"] = request.masks[start:]
    if wants.hidden_states:
        found["hidden_states"] = request.hidden_states[start:]
    if wants.routed_experts:
        found["routed_experts"] = [row.tolist() for row in _routes(request, start)]
    return found


def _routes(request: Request, start: int) -> Sequence[Any]:
    """Rows of the tokens that led to the output from `start` on: with its first token come the prompt's."""
    scored = (request.finish_reason or {}).get("type") == "length"
    whole = request.prompt_len + request.output_len - 1 if request.output_len or scored else 0
    return request.routes[request.prompt_len + start - 1 if start else 0 : whole]


def _triples(values: Sequence[float | None], ids: Sequence[int], tokenizer: Any) -> list[Triple]:
    return [
        (value, token, None if tokenizer is None else decode(tokenizer, [token], False))
        for value, token in zip(values, ids, strict=True)
    ]


def final_text(request: Request, tokenizer: Any) -> str:
    """The whole text of a request, less what ended it unless `no_stop_trim`."""
    if tokenizer is None:
        return ""
    ids, params = request.output_ids, request.params
    matched = (request.finish_reason or {}).get("matched")
    if matched is not None and not params.no_stop_trim:
        if request.stop_at is not None and isinstance(matched, str):
            assert request.text is not None
            return request.text.text[: request.stop_at]
        ids = ids[:-1]
    return decode(tokenizer, ids, params.skip_special_tokens)


class StreamCursor:
    """How much of one request a streaming consumer has been given."""

    def __init__(self, request: Request, tokenizer: Any) -> None:
        self.request = request
        self.done = False
        self._tokenizer = tokenizer
        self._sent = 0
        self._text = (
            None if tokenizer is None else IncrementalText(tokenizer, request.params.skip_special_tokens)
        )

    @property
    def has_news(self) -> bool:
        """Whether a message is due: enough new tokens, or the end."""
        if self.request.finished:
            return not self.done
        unsent = self.request.output_len - self._sent
        return unsent >= (self.request.params.stream_interval if self._sent else 1)

    def take(self) -> dict[str, Any]:
        """All that is new since the last call. Call it under the loop's lock."""
        request, start = self.request, self._sent
        self._sent, self.done = request.output_len, request.finished
        text: str | None = None
        if not request.finished:
            text = "" if self._text is None else self._text.push(request.output_ids[start:])
            if not request.params.no_stop_trim:
                text = without_partial_stop(text, tuple(request.params.stop or ()))
        message = result(request, self._tokenizer, start=start, text=text)
        return {"index": request.index, "prompt_index": request.prompt_index, **message}
