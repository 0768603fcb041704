"""Streams: nothing is lost, split or leaked at any speed of the consumer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from tokenspeed_rl import LLM, Engine
from tokenspeed_rl.errors import EngineStateError
from tokenspeed_rl.requests import GenerateReqInput

WAIT = 20.0
DELTAS = ("output_token_logprobs", "output_token_logprobs_raw", "output_top_logprobs")
TOTALS = (
    "finish_reason",
    "input_token_logprobs",
    "weight_versions",
    "completion_tokens",
    "prompt_tokens",
    "cached_tokens",
)
ASKED = {
    "return_logprob": True,
    "logprob_kinds": ["sampling", "raw"],
    "top_logprobs_num": 2,
    "logprob_start_len": 0,
}


def joined(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The final result that the messages of one sample add up to."""
    last = messages[-1]
    deltas, totals = ([name for name in names if name in last["meta_info"]] for names in (DELTAS, TOTALS))
    return {
        "text": last["text"],
        "output_ids": [token for message in messages for token in message["output_ids"]],
        "meta_info": {
            **{name: last["meta_info"][name] for name in totals},
            **{name: [row for message in messages for row in message["meta_info"][name]] for name in deltas},
        },
    }


def without_what_differs(result: dict[str, Any]) -> dict[str, Any]:
    kept = (*DELTAS, *TOTALS)
    return {
        "text": result["text"],
        "output_ids": result["output_ids"],
        "meta_info": {name: result["meta_info"][name] for name in kept if name in result["meta_info"]},
    }


@pytest.mark.parametrize("taken_after", [[1] * 12, [3, 1, 5, 3], [12], [1, 11]], ids=str)
def test_deltas_add_up_at_any_speed(
    counter: Engine, tiny: Any, step_gate: Any, taken_after: list[int]
) -> None:
    """Ids and logprobs of a stream are deltas that add up to the final result however slow the consumer is: a
    slow one gets fewer, longer messages (coalescing) and loses nothing. Spans and counts are cumulative."""
    counter.flush_cache()
    ask: dict[str, Any] = dict(input_ids=tiny.prompt(20), sampling_params={"max_new_tokens": 12, "seed": 3})
    whole = counter.generate(**ask, **ASKED)
    counter.flush_cache()
    with step_gate(counter) as gate:
        stream = counter.generate(**ask, **ASKED, stream=True)
        messages = []
        for steps in taken_after:
            gate.step(steps)
            if sum(len(message["output_ids"]) for message in messages) + steps < 12:
                gate.wait()
            else:
                gate.open()
                counter.flush_cache()  # a command runs between two steps: the last one is done
            messages.append(next(stream))
        assert next(stream, None) is None
    assert [len(message["output_ids"]) for message in messages] == taken_after
    assert joined(messages) == without_what_differs(whole)
    seen = 0
    for message in messages:
        meta, seen = message["meta_info"], seen + len(message["output_ids"])
        assert meta["completion_tokens"] == seen
        assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": seen}]
        assert (meta["finish_reason"] is None) == (seen < 12)


def test_characters_are_never_split(tiny: Any, make_engine: Any) -> None:
    """Text is cumulative and holds whole characters only, while ids come byte by byte."""
    written = "aé€😀z"
    order = {a: b for a, b in zip(written.encode(), [*written.encode()[1:], ord("a")], strict=True)}
    model = tiny.successor(lambda token: order.get(token, token))
    engine = make_engine(model, tokenizer=tiny.tokenizer())
    ask: dict[str, Any] = dict(
        prompt="a", sampling_params={"temperature": 0, "max_new_tokens": 2 * len(written.encode())}
    )
    texts = [message["text"] for message in engine.generate(**ask, stream=True)]
    allowed = {(written * 3)[1:end] for end in range(1, 3 * len(written))}
    assert set(texts) <= allowed and texts[-1] == "é€😀zaé€😀za"
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert texts[-1] == engine.generate(**ask)["text"]


def test_stop_strings_never_leak(counter: Engine) -> None:
    """What may become a stop string is held back until it is one (and never shown) or is none (and shown)."""
    params = {"temperature": 0, "max_new_tokens": 10, "stop": ["fgh", "cdX"]}
    messages = list(counter.generate("a", params, stream=True))
    texts = [message["text"] for message in messages]
    # A consumer that comes late sees fewer of them, never others.
    assert set(texts) <= {"", "b", "bcde"} and texts[-1] == "bcde"
    assert messages[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": "fgh"}
    assert joined(messages)["output_ids"] == list(b"bcdefgh")

    params = {"temperature": 0, "max_new_tokens": 4, "stop": "defg"}
    texts = [message["text"] for message in counter.generate("a", params, stream=True)]
    assert set(texts[:-1]) <= {"b", "bc"} and texts[-1] == "bcde", "at the end nothing is held back"

    kept = {"temperature": 0, "stop": "def", "no_stop_trim": True}
    assert [m["text"] for m in counter.generate("a", kept, stream=True)][-1] == "bcdef"


def test_stream_interval(counter: Engine, step_gate: Any) -> None:
    """`stream_interval` is tokens per message; the first and the last come at once."""
    params = {"temperature": 0, "max_new_tokens": 9, "stream_interval": 3, "ignore_eos": True}
    sizes: list[int] = []
    with step_gate(counter) as gate:
        stream = counter.generate(input_ids=[5], sampling_params=params, stream=True)
        with ThreadPoolExecutor(1) as pool:
            for steps in (1, 3, 3):
                message = pool.submit(next, stream)
                gate.step(steps)
                gate.wait()
                sizes.append(len(message.result(WAIT)["output_ids"]))
        gate.open()
        sizes += [len(message["output_ids"]) for message in stream]
    assert sizes == [1, 3, 3, 2]


def test_samples_and_prompts_are_told_apart(counter: Engine, tiny: Any) -> None:
    """A stream of several prompts with several samples: every message names its prompt and sample, and each
    sample adds up to what the same call gives without a stream."""
    prompts = [tiny.prompt(5, seed=1), tiny.prompt(9, seed=2)]
    params = [{"n": 3, "seed": 4, "max_new_tokens": 6}, {"n": 2, "seed": 5, "max_new_tokens": 3}]
    ask: dict[str, Any] = dict(input_ids=prompts, sampling_params=params, rid=["p", "q"], return_logprob=True)
    whole = counter.generate(**ask)
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for message in counter.generate(**ask, stream=True):
        assert message["meta_info"]["index"] == message["index"]
        assert message["meta_info"]["id"] == "pq"[message["prompt_index"]]
        found.setdefault((message["prompt_index"], message["index"]), []).append(message)
    assert sorted(found) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    for place, result in zip(sorted(found), whole, strict=True):
        messages = found[place]
        assert [t for m in messages for t in m["output_ids"]] == result["output_ids"]
        assert messages[-1]["text"] == result["text"]
        logprobs = [triple for m in messages for triple in m["meta_info"]["output_token_logprobs"]]
        assert logprobs == result["meta_info"]["output_token_logprobs"]


async def drain(stream: AsyncIterator[dict[str, Any]]) -> list[int]:
    return [token async for message in stream for token in message["output_ids"]]


def test_submits_at_the_call(counter: Engine, step_gate: Any) -> None:
    """`stream=True` submits at the call, in every form of it, before anybody asks for a message."""
    params = {"temperature": 0, "max_new_tokens": 2}
    obj = GenerateReqInput(input_ids=[7], sampling_params=params, stream=True)
    with step_gate(counter) as gate:
        sync = [counter.generate(input_ids=[7], sampling_params=params, stream=True)]
        sync.append(counter.llm.generate_stream(obj))
        gate.submitted(2)
        lazy = counter.client.generate_request(obj)
        gate.submitted()
        awaited = asyncio.run(counter.async_generate(input_ids=[7], sampling_params=params, stream=True))
        gate.submitted()
        assert counter.get_load()[0].num_reqs == 4
        gate.open()
        assert [[t for m in stream for t in m["output_ids"]] for stream in sync] == [[8, 9]] * 2
        assert [asyncio.run(drain(stream)) for stream in (lazy, awaited)] == [[8, 9]] * 2


def test_foreign_event_loops(counter: Engine) -> None:
    """Streams and plain calls work from several event loops on several threads at the same time."""

    async def use(start: int) -> list[Any]:
        params = {"temperature": 0, "max_new_tokens": 8}
        stream = await counter.async_generate(input_ids=[start], sampling_params=params, stream=True)
        plain = counter.async_generate(input_ids=[start], sampling_params=params)
        result, tokens, state = await asyncio.gather(plain, drain(stream), counter.client.get_load())
        assert state[0].num_reqs >= 0
        return [tokens, result["output_ids"]]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda start: asyncio.run(use(start)), range(40, 56)))
    assert found == [[list(range(s + 1, s + 9))] * 2 for s in range(40, 56)]


def test_one_consumer(counter: Engine, step_gate: Any) -> None:
    """A second task that asks the same stream is refused with a typed error; the first one goes on."""

    async def both() -> list[int]:
        stream = await counter.async_generate(
            input_ids=[3], sampling_params={"temperature": 0, "max_new_tokens": 3}, stream=True
        )
        first = asyncio.create_task(drain(stream))
        await asyncio.sleep(0)  # the first one asks and waits
        with pytest.raises(EngineStateError, match="another task"):
            await anext(stream)
        gate.open()
        return await first

    with step_gate(counter) as gate:
        assert asyncio.run(both()) == [4, 5, 6]


def test_a_whole_result_of_a_streaming_request(counter: Engine) -> None:
    """`LLM.generate` gives the whole, final result of a streaming request; so does `AsyncLLM.generate`."""
    obj = GenerateReqInput(text="a", sampling_params={"temperature": 0, "max_new_tokens": 4}, stream=True)
    results = [
        counter.llm.generate(obj),
        LLM(counter.client).generate(obj),
        asyncio.run(counter.client.generate(obj)),
    ]
    assert [result["output_ids"] for result in results] == [list(b"bcde")] * 3
    assert [result["text"] for result in results] == ["bcde"] * 3
    assert obj.stream
