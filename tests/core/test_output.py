"""The dict that callers get, whole and in deltas."""

import random
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_rl.core.output import StreamCursor, result
from tokenspeed_rl.core.request import FinishReason, Request, Span, Wants
from tokenspeed_rl.core.stop import check_stop
from tokenspeed_rl.core.text import decode
from tokenspeed_rl.sampling_params import SamplingParams

ALL = Wants(
    logprob=True,
    kinds=("sampling", "raw", "processed"),
    prompt_start=1,
    top=2,
    token_ids=(4, 5),
    text=True,
    sampling_mask=True,
    hidden_states=True,
)
PER_TOKEN = {
    "output_token_logprobs",
    "output_token_logprobs_raw",
    "output_token_logprobs_processed",
    "output_top_logprobs",
    "output_token_ids_logprobs",
    "sampling_mask",
    "hidden_states",
}
ALWAYS = {
    "prompt_ids",
    "id",
    "index",
    "prompt_index",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "weight_version",
    "weight_versions",
    "e2e_latency",
}
STOP: FinishReason = {"type": "stop", "matched": 7}
LENGTH: FinishReason = {"type": "length", "length": 3}
ABORT: FinishReason = {"type": "abort", "message": "aborted"}


def draw(request: Request, token: int, version: str = "1") -> None:
    """What the loop notes with a token, numbered so that a slip shows."""
    request.record(token, version)
    number = float(request.output_len)
    for kind, shift in (("sampling", 0.0), ("raw", 0.25), ("processed", 0.5)):
        request.logprobs.setdefault(kind, []).append(-number - shift)
    request.top_logprobs.append([(-number, 8), (-number - 1, 9)])
    request.ids_logprobs.append([-number, -number - 2])
    request.masks.append([token, 8])
    request.hidden_states.append([number])


def end(request: Request, reason: FinishReason, version: str = "1") -> None:
    request.finish_reason, request.finished_at = reason, request.created + 2.5
    if not request.spans:
        request.spans.append(Span(version, 0, 0))


@pytest.mark.parametrize("reason", [STOP, LENGTH, ABORT], ids=lambda reason: str(reason["type"]))
@pytest.mark.parametrize("count", [0, 1, 3])
def test_every_field_for_every_end(
    new_request: Callable[..., Request], tokenizer: Any, reason: FinishReason, count: int
) -> None:
    """C2: output ids, counts and logprobs agree for every finish reason, also for an abort before the first
    token, where all that was asked for is there and empty, under one span {0, 0}."""
    request = new_request([3, 4, 5], wants=ALL, rid="mine", index=2, prompt_index=1, cached_tokens=2)
    for token in (6, 310, 7)[3 - count :]:
        draw(request, token)
    request.prompt_logprobs = [-0.5] if count else []
    end(request, reason)
    whole = result(request, tokenizer)
    meta = whole["meta_info"]
    assert set(whole) == {"text", "output_ids", "meta_info"}
    assert set(meta) == ALWAYS | PER_TOKEN | {"input_token_logprobs"}
    assert whole["output_ids"] == [6, 310, 7][3 - count :]
    assert all(len(meta[name]) == meta["completion_tokens"] == count for name in PER_TOKEN)
    assert (meta["id"], meta["index"], meta["prompt_index"]) == ("mine", 2, 1)
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["finish_reason"]) == (3, 2, reason)
    assert (meta["weight_version"], meta["e2e_latency"]) == ("1", 2.5)
    assert meta["weight_versions"] == [{"version": "1", "start": 0, "end": count}]
    prompt = [(None, 4, tokenizer.decode([4])), (-0.5, 5, tokenizer.decode([5]))]
    assert meta["input_token_logprobs"] == (prompt if count else prompt[:1])


def test_forms_of_what_was_asked(new_request: Callable[..., Request], tokenizer: Any) -> None:
    """Contract 4: logprobs are (value, id, text or None) triples; top and watched ids: lists of them."""
    request = new_request([3, 4], wants=ALL)
    draw(request, 6)
    end(request, LENGTH)
    meta = result(request, tokenizer)["meta_info"]
    word = {token: tokenizer.decode([token]) for token in (4, 5, 6, 8, 9)}
    assert meta["output_token_logprobs"] == [(-1.0, 6, word[6])]
    assert meta["output_token_logprobs_raw"] == [(-1.25, 6, word[6])]
    assert meta["output_token_logprobs_processed"] == [(-1.5, 6, word[6])]
    assert meta["output_top_logprobs"] == [[(-1.0, 8, word[8]), (-2.0, 9, word[9])]]
    assert meta["output_token_ids_logprobs"] == [[(-1.0, 4, word[4]), (-3.0, 5, word[5])]]
    assert (meta["sampling_mask"], meta["hidden_states"]) == ([[6, 8]], [[1.0]])

    request.wants = Wants(logprob=True, kinds=("raw",))
    meta = result(request, tokenizer)["meta_info"]
    assert set(meta) == ALWAYS | {"output_token_logprobs_raw"}
    assert meta["output_token_logprobs_raw"] == [(-1.25, 6, None)]
    request.wants = Wants()
    assert set(result(request, None)["meta_info"]) == ALWAYS


def test_text_is_trimmed_of_what_ended_it(new_request: Callable[..., Request], tokenizer: Any) -> None:
    """Contract 4: the stop token is in `output_ids` but not in `text`, unless `no_stop_trim`; a token that
    merely was the last stays; without a tokenizer text is ""."""
    a, b, space = tokenizer("ab ")["input_ids"]
    for reason, keep, text in (
        ({"type": "stop", "matched": b}, False, "a"),
        ({"type": "stop", "matched": b}, True, "ab"),
        (LENGTH, False, "ab"),
        (ABORT, False, "ab"),
    ):
        request = new_request([space], params=SamplingParams(no_stop_trim=keep).validate())
        for token in (a, b):
            draw(request, token)
        end(request, reason)
        assert result(request, tokenizer)["text"] == text
        assert result(request, tokenizer)["output_ids"] == [a, b]
        assert result(request, None)["text"] == ""
    special = new_request([space], params=SamplingParams(skip_special_tokens=False).validate())
    draw(special, 0)
    end(special, LENGTH)
    assert result(special, tokenizer)["text"] == "<s>"


@given(versions=st.lists(st.sampled_from("abc"), max_size=12))
def test_version_spans(new_request: Callable[..., Request], versions: list[str]) -> None:
    """D3: spans are contiguous from 0 to the last token, split exactly where the version changes; the same
    label doesn't split."""
    request = new_request([3])
    for version in versions:
        draw(request, 5, version)
    end(request, ABORT, "z")
    meta = result(request, None)["meta_info"]
    runs = [(version, len(list(run))) for version, run in groupby(versions)] or [("z", 0)]
    spans, start = [], 0
    for version, length in runs:
        spans.append({"version": version, "start": start, "end": start + length})
        start += length
    assert meta["weight_versions"] == spans
    assert meta["weight_version"] == spans[-1]["version"]


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    length=st.integers(0, 14),
    interval=st.integers(1, 4),
    stop=st.sampled_from([None, "ab", ["a ", "b"], "\n"]),
    ending=st.sampled_from(["length", "abort"]),
)
def test_deltas_add_up_at_any_pace(
    new_request: Callable[..., Request],
    tokenizer: Any,
    seed: int,
    length: int,
    interval: int,
    stop: Any,
    ending: str,
) -> None:
    """F10, F15: whatever the consumer's pace, ids and logprobs concatenate to the final result; text only
    grows, never shows part of a stop string or character, and ends as the final text; messages come every
    `stream_interval` tokens."""
    pace = random.Random(seed)
    params = SamplingParams(stop=stop, stream_interval=interval).validate()
    request = new_request([3, 4], params=params, wants=ALL, max_new_tokens=length + (ending == "abort"))
    cursor, messages = StreamCursor(request, tokenizer), []
    string = "".join(pace.choice("ab é漢😁\n") for _ in range(14))
    for token in [*tokenizer(string)["input_ids"], 310, 0][:length]:
        draw(request, token)
        reason = check_stop(request, tokenizer)
        if reason is not None:
            end(request, reason)
            break
        if pace.random() < 0.6:
            unsent = request.output_len - sum(len(message["output_ids"]) for message in messages)
            assert cursor.has_news == (unsent >= (interval if messages else 1))
            if cursor.has_news:
                messages.append(cursor.take())
    if not request.finished:
        end(request, ABORT)
    assert cursor.has_news and not cursor.done
    messages.append(cursor.take())
    assert cursor.done and not cursor.has_news

    final = result(request, tokenizer)
    assert [token for message in messages for token in message["output_ids"]] == final["output_ids"]
    for name in PER_TOKEN:
        assert [one for message in messages for one in message["meta_info"][name]] == final["meta_info"][name]
    shown = [message["text"] for message in messages]
    assert all(final["text"].startswith(text) for text in shown) and shown[-1] == final["text"]
    assert shown == sorted(shown, key=len)
    counts = [message["meta_info"]["completion_tokens"] for message in messages]
    assert counts == sorted(counts) and counts[-1] == request.output_len
    assert all((message["index"], message["prompt_index"]) == (0, 0) for message in messages)
    assert {message["meta_info"]["finish_reason"] is None for message in messages[:-1]} <= {True}


def test_streams_without_a_tokenizer(new_request: Callable[..., Request]) -> None:
    """Token in, token out: ids stream, text stays ""."""
    request = new_request([3])
    cursor = StreamCursor(request, None)
    assert not cursor.has_news
    request.record(5, "1")
    first = cursor.take()
    request.record(6, "1")
    end(request, LENGTH)
    last = cursor.take()
    assert (first["output_ids"], last["output_ids"], first["text"], last["text"]) == ([5], [6], "", "")


def test_stop_strings_can_be_shown(new_request: Callable[..., Request], tokenizer: Any) -> None:
    """`no_stop_trim`: what may become a stop string is not held back in a stream."""
    for keep, text in ((True, "a"), (False, "")):
        request = new_request([3], params=SamplingParams(stop="ab", no_stop_trim=keep).validate())
        cursor = StreamCursor(request, tokenizer)
        [token] = tokenizer("a")["input_ids"]
        draw(request, token)
        assert cursor.take()["text"] == text
    assert decode(tokenizer, [token], True) == "a"
