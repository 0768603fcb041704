"""Whether one finished sample is what the contract promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from tests.soak.frozen import Interval, inside
from tests.soak.weights import Book, Reference

EXACT = 1e-4
ENDINGS = ("aborted", "the engine was paused", "abandoned by its caller")


@dataclass(frozen=True)
class Asked:
    """What a sample was asked for."""

    rid: str
    prompt: list[int]
    max_new_tokens: int
    temperature: float
    seed: int | None
    stop_ids: tuple[int, ...]
    prompt_start: int
    top: int
    routes: bool
    """Whether the experts of each token were asked for."""


@dataclass
class Checked:
    """What was checked of a sample."""

    exact: int = 0
    frozen: int = 0
    versions: int = 0


def check(
    asked: Asked, result: dict[str, Any], intervals: list[Interval], book: Book, reference: Reference
) -> Checked:
    """Raises AssertionError, saying what is wrong."""
    meta, ids = result["meta_info"], result["output_ids"]
    _check_end(asked, ids, meta)
    spans = meta["weight_versions"]
    assert spans[0]["start"] == 0 and spans[-1]["end"] == len(ids), f"spans {spans} over {len(ids)} tokens"
    joined = all(a["end"] == b["start"] and a["version"] != b["version"] for a, b in pairwise(spans))
    assert joined, f"spans {spans}"
    assert meta["weight_version"] == spans[-1]["version"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == ids
    whole = [*asked.prompt, *ids]
    done = Checked(versions=len(spans))
    for number, span in enumerate(spans):
        rows = _lazily(book, reference, span["version"], whole)
        if number == 0 and asked.prompt_start >= 0 and not inside(0, intervals):
            _check_prompt(asked, meta, rows, complete=bool(ids))
        for at in range(span["start"], span["end"]):
            if inside(at, intervals):
                done.frozen += 1
            else:
                _check_token(asked, meta, rows()[len(asked.prompt) - 1 + at], at)
                done.exact += 1
        if asked.routes and ids:
            _check_routes(
                asked, meta, span, intervals, reference.experts(book.origin(span["version"]), whole)
            )
    if asked.routes:
        none = not ids and meta["finish_reason"]["type"] == "abort"
        assert len(meta["routed_experts"]) == (0 if none else len(whole) - 1), "rows are missing"
    return done


def _check_routes(
    asked: Asked, meta: dict[str, Any], span: dict[str, Any], intervals: list[Interval], experts: Any
) -> None:
    """Of the tokens computed for the draws of a version; with the first come the prompt's."""
    for at in range(span["start"], span["end"]):
        end = len(asked.prompt) + at
        for row in range(end - 1 if at else 0, 0 if inside(at, intervals) else end):
            got = meta["routed_experts"][row]
            assert got == experts[row], f"row {row} of {asked.rid}: experts {got}, not {experts[row]}"


def _lazily(book: Book, reference: Reference, version: str, ids: Sequence[int]) -> Callable[[], Tensor]:
    found: list[Tensor] = []

    def rows() -> Tensor:
        if not found:
            found.append(reference.logits(book.origin(version), ids))
        return found[0]

    return rows


def _check_end(asked: Asked, ids: Sequence[int], meta: dict[str, Any]) -> None:
    reason = meta["finish_reason"]
    assert meta["id"] == asked.rid
    assert meta["prompt_tokens"] == len(asked.prompt)
    assert meta["completion_tokens"] == len(ids) <= asked.max_new_tokens, "more tokens than asked for"
    assert not any(token in asked.stop_ids for token in ids[:-1]), "went on behind a stop token"
    ended = bool(ids) and ids[-1] in asked.stop_ids
    match reason["type"]:
        case "stop":
            assert ended and reason["matched"] == ids[-1], f"{reason} after {ids[-3:]}"
        case "length":
            assert len(ids) == asked.max_new_tokens and not ended, f"{reason} after {len(ids)} tokens"
        case "abort":
            assert reason["message"] in ENDINGS, f"{reason}"
            at_end = ended or len(ids) == asked.max_new_tokens > 0
            assert not at_end, f"{reason}, but it was at its end"
        case other:
            raise AssertionError(f"finish reason {other!r}")


def _check_token(asked: Asked, meta: dict[str, Any], row: Tensor, at: int) -> None:
    value, token, _ = meta["output_token_logprobs"][at]
    logprobs = (row / (asked.temperature or 1.0)).log_softmax(-1)
    gap = abs(value - logprobs[token].item())
    assert gap < EXACT, f"token {at} of {asked.rid}: logprob {value}, {gap:.2e} off"
    if asked.temperature == 0.0:
        short = (row.max() - row[token]).item()
        assert short < EXACT, f"token {at} of {asked.rid}: not the likeliest, by {short:.2e}"
    if asked.top:
        best = logprobs.topk(asked.top).values.tolist()
        got = [value for value, _, _ in meta["output_top_logprobs"][at]]
        far = max(abs(a - b) for a, b in zip(best, got, strict=True))
        assert far < EXACT, f"token {at} of {asked.rid}: the likeliest are {far:.2e} off"


def _check_prompt(asked: Asked, meta: dict[str, Any], rows: Callable[[], Tensor], *, complete: bool) -> None:
    if not complete and meta["finish_reason"]["type"] == "abort":
        return  # perhaps before its prompt was computed
    given = meta["input_token_logprobs"]
    start, temperature = asked.prompt_start, asked.temperature or 1.0
    assert [token for _, token, _ in given] == asked.prompt[start:], "prompt logprobs of other tokens"
    assert given[0][0] is None or start > 0
    logprobs = (rows()[: len(asked.prompt)] / temperature).log_softmax(-1)
    for at, (value, token, _) in enumerate(given[1:], start=start + 1):
        gap = abs(value - logprobs[at - 1, token].item())
        assert gap < EXACT, f"prompt token {at} of {asked.rid}: logprob {value}, {gap:.2e} off"
