"""The faces of one engine: what `Engine`, `LLM` and `AsyncLLM` give back, and how they carry calls."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tokenspeed_rl import LLM, AsyncLLM, Engine, EngineClient, EngineConfig, SamplingParams
from tokenspeed_rl.errors import EngineStateError, RequestError
from tokenspeed_rl.requests import FlushCacheReqOutput, GenerateReqInput, GetLoadReqOutput

WAIT = 20.0
GREEDY = {"temperature": 0, "max_new_tokens": 3}
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if tools %}{{ tools|length }}{% endif %}{{ extra }}{% if add_generation_prompt %}:{% endif %}"
)


def test_what_an_engine_is(counter: Engine, tiny: Any, make_engine: Any, tmp_path: Any) -> None:
    """Contract 1, 2: an engine holds an EngineClient and its facade, with the attributes of the protocol."""
    client = counter.client
    assert isinstance(client, AsyncLLM) and isinstance(client, EngineClient)
    assert isinstance(counter.llm, LLM) and counter.llm.async_llm is client
    assert client.is_generation and not client.is_image_gen and not client.gracefully_exit
    assert client.server_args == EngineConfig(max_total_tokens=1024)
    assert client.model_config.vocab_size == 256 and client.model_path == ""
    assert len(client.tokenizer) == 256 and not client.is_server_starting()
    folder = tmp_path / "some-model"
    tiny.model().save_pretrained(folder)
    from_files = make_engine(str(folder)).client
    assert (from_files.model_path, from_files.served_model_name) == (str(folder), "some-model")
    assert from_files.tokenizer is None and from_files.last_receive_tstamp == 0.0
    assert make_engine(str(folder), served_model_name="x").client.served_model_name == "x"


def test_time_of_the_last_output(counter: Engine) -> None:
    """Contract 2: `last_receive_tstamp` is the epoch second of the last output."""
    before = time.time()
    counter.generate(input_ids=[1], sampling_params=GREEDY)
    assert before <= counter.client.last_receive_tstamp <= time.time()


@pytest.mark.parametrize("face", ["generate", "bar", "async_generate", "llm", "client", "another facade"])
def test_shapes_of_results(counter: Engine, face: str) -> None:
    """Contract 4: one prompt with n == 1 gives a dict; a list, of length 1 too, or n > 1 gives a list,
    prompt-major with samples adjacent, through every face and for text as for ids."""

    def ask(**fields: Any) -> Any:
        if face == "generate":
            return counter.generate(**fields)
        if face == "bar":
            return counter.generate(**fields, use_tqdm=True)
        if face == "async_generate":
            return asyncio.run(counter.async_generate(**fields))
        if "prompt" in fields:
            fields["text"] = fields.pop("prompt")
        obj = GenerateReqInput(**fields)
        if face == "llm":
            return counter.llm.generate(obj)
        if face == "client":
            return asyncio.run(anext(counter.client.generate_request(obj)))
        return LLM(counter.client).generate(obj)

    one = ask(input_ids=[10], sampling_params=GREEDY)
    assert isinstance(one, dict) and one["output_ids"] == [11, 12, 13]
    assert [r["text"] for r in ask(prompt=["a"], sampling_params=GREEDY)] == ["bcd"]
    assert ask(prompt="a", sampling_params=SamplingParams(**GREEDY))["text"] == "bcd"
    assert [r["output_ids"] for r in ask(input_ids=[[10]], sampling_params=GREEDY)] == [[11, 12, 13]]
    many = ask(
        input_ids=[[10], [20]], sampling_params=[{**GREEDY, "n": 2}, {**GREEDY, "n": 3}], rid=["x", "y"]
    )
    assert [(r["meta_info"]["id"], r["meta_info"]["index"], r["output_ids"][0]) for r in many] == [
        ("x", 0, 11),
        ("x", 1, 11),
        ("y", 0, 21),
        ("y", 1, 21),
        ("y", 2, 21),
    ]
    assert len(ask(input_ids=[10], sampling_params={**GREEDY, "n": 2})) == 2


def test_a_progress_bar(counter: Engine, capsys: Any) -> None:
    """`use_tqdm` shows a bar that counts samples to their number, and changes nothing else."""
    params = [{**GREEDY, "n": 2}, {**GREEDY, "max_new_tokens": 9}]
    results = counter.generate(input_ids=[[1], [2]], sampling_params=params, use_tqdm=True)
    assert [len(result["output_ids"]) for result in results] == [3, 3, 9]
    assert "3/3" in capsys.readouterr().err
    with pytest.raises(RequestError, match="not for streams"):
        counter.generate(input_ids=[1], stream=True, use_tqdm=True)
    counter.generate(input_ids=[1], sampling_params=GREEDY)
    assert capsys.readouterr().err == ""


def test_chat(counter: Engine, tiny: Any, make_engine: Any) -> None:
    """Contract 7: `chat` renders messages with the chat template and its arguments and goes on from there; a
    list of conversations gives a list; everything else is as in `generate`."""
    user, answer = {"role": "u", "content": "x"}, {"role": "a", "content": "bc"}

    def prompts(**fields: Any) -> list[str]:
        results = counter.chat(
            **{"messages": [user], "chat_template": TEMPLATE, "sampling_params": GREEDY, **fields},
            return_logprob=True,
            logprob_start_len=0,
        )
        listed = results if isinstance(results, list) else [results]
        rows = [result["meta_info"]["input_token_logprobs"] for result in listed]
        return [bytes(token for _, token, _ in row).decode() for row in rows]

    assert prompts() == ["<u>x:"]
    assert prompts(messages=[[user], [user, answer]]) == ["<u>x:", "<u>x<a>bc:"]
    assert prompts(messages=[[user]]) == ["<u>x:"]
    assert prompts(messages=[user, answer], continue_final_message=True) == ["<u>x<a>bc"]
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
    assert prompts(tools=[tool]) == ["<u>x1:"]
    assert prompts(chat_template_kwargs={"extra": "!"}) == ["<u>x!:"]
    assert counter.chat([user], GREEDY, chat_template=TEMPLATE)["text"] == ";<="
    assert isinstance(counter.chat([[user]], GREEDY, chat_template=TEMPLATE), list)
    stream = counter.chat([user], GREEDY, chat_template=TEMPLATE, stream=True)
    assert list(stream)[-1]["text"] == ";<="
    with pytest.raises(RequestError, match="needs a tokenizer"):
        make_engine(tiny.model()).chat([user])


def test_run_within_its_own_event_loop(counter: Engine) -> None:
    """Blocking calls from a coroutine that the facade itself runs raise instead of waiting for themselves;
    the engine and other facades go on."""

    async def inside(call: Any) -> Any:
        return call()

    calls = [
        lambda: counter.generate(input_ids=[1]),
        lambda: counter.generate(input_ids=[1], use_tqdm=True),
        lambda: next(counter.generate(input_ids=[1], stream=True)),
        lambda: counter.llm.generate(GenerateReqInput(input_ids=[1])),
        counter.flush_cache,
        counter.weights_checksum,
    ]
    for call in calls:
        with pytest.raises(EngineStateError, match="Await it instead"):
            counter.llm.run(inside(call), timeout=WAIT)
    other = LLM(counter.client)
    result = counter.llm.run(inside(lambda: other.generate(GenerateReqInput(input_ids=[1]))), timeout=WAIT)
    assert result["output_ids"]
    assert counter.llm.run(inside(counter.get_load), timeout=WAIT)[0].num_reqs == 0  # it waits for nothing

    async def awaited() -> Any:
        return await counter.async_generate(input_ids=[1], sampling_params=GREEDY)

    assert counter.llm.run(awaited(), timeout=WAIT)["output_ids"] == [2, 3, 4]


def test_run_gives_what_the_coroutine_gives(counter: Engine) -> None:
    """`LLM.run` returns or raises what its coroutine does, a TimeoutError of its own included."""

    async def give(value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    assert counter.llm.run(give(None)) is None and counter.llm.run(give([1]), timeout=WAIT) == [1]
    for error in (KeyError("k"), TimeoutError("its own")):
        with pytest.raises(type(error)) as caught:
            counter.llm.run(give(error), timeout=WAIT)
        assert type(caught.value) is type(error) and caught.value.args == error.args


def test_generate_stream(counter: Engine) -> None:
    """`LLM.generate_stream` gives the messages of the client's stream, and the one whole result of a request
    that doesn't stream."""
    obj = GenerateReqInput(input_ids=[[1], [5]], sampling_params=GREEDY, stream=True)
    found: dict[int, list[int]] = {}
    for message in counter.llm.generate_stream(obj):
        found.setdefault(message["prompt_index"], []).extend(message["output_ids"])
    assert found == {0: [2, 3, 4], 1: [6, 7, 8]}
    [whole] = counter.llm.generate_stream(GenerateReqInput(input_ids=[[1]], sampling_params=GREEDY))
    assert [result["output_ids"] for result in whole] == [[2, 3, 4]]


def test_load_and_state(tiny: Any, make_engine: Any, step_gate: Any) -> None:
    """Contract 3: `get_load` counts all unfinished samples, those of them not running, and pages in use;
    `get_internal_state` has the settings and the axes of state."""
    engine = make_engine(tiny.successor(), max_running_requests=2, page_size=4, max_total_tokens=128)
    assert engine.get_load() == [GetLoadReqOutput(dp_rank=0, num_reqs=0, num_waiting_reqs=0, num_pages=0)]
    with step_gate(engine) as gate:
        obj = GenerateReqInput(input_ids=[[1] * 6, [2] * 6, [3] * 6], sampling_params=GREEDY)
        stream = engine.client.generate_request(obj)
        gate.step()
        gate.wait()
        load = engine.get_load()[0]
        assert (load.num_reqs, load.num_waiting_reqs, load.num_pages) == (3, 1, 4)
        state = engine.get_internal_state()[0]
        assert (state["num_running"], state["num_waiting"]) == (2, 1)
        assert state["admission"] == "running" and state["validity"] == "valid"
        assert set(state["residency"].values()) == {"resident"} and state["weights_shared"]
        assert state["server_args"]["page_size"] == 4 and state["weight_version"] == "default"
        gate.open()
        assert len(asyncio.run(stream.result())) == 3
    assert engine.get_load()[0].num_pages == 0
    assert engine.get_internal_state()[0]["output_tokens"] == 9


def test_flush_cache(counter: Engine) -> None:
    """`flush_cache` forgets prefixes: the same prompt is computed again, with the same result."""
    prompt = list(range(40, 80))
    asked = [counter.generate(input_ids=prompt, sampling_params=GREEDY) for _ in range(2)]
    assert counter.flush_cache() == FlushCacheReqOutput(success=True, message="the prefix cache is empty")
    asked.append(counter.generate(input_ids=prompt, sampling_params=GREEDY))
    assert [result["meta_info"]["cached_tokens"] for result in asked] == [0, 32, 0]
    assert [result["output_ids"] for result in asked] == [[80, 81, 82]] * 3


def test_flushing_under_a_live_request(counter: Engine, tiny: Any, step_gate: Any) -> None:
    """A flush in the middle of a request doesn't change its output; its pages come back when it ends."""
    with step_gate(counter) as gate, ThreadPoolExecutor(1) as pool:
        params = {"temperature": 0, "max_new_tokens": 40}
        stream = counter.generate(input_ids=list(range(10, 50)), sampling_params=params, stream=True)
        gate.step(10)
        gate.wait()
        flush = pool.submit(counter.flush_cache)
        gate.commanded()
        gate.open()
        assert [t for m in stream for t in m["output_ids"]] == list(range(50, 90))
        assert flush.result(WAIT).success
    tiny.all_back(counter)


def test_context_managers(tiny: Any) -> None:
    """`with Engine` and `async with AsyncLLM` end the engine, on exceptions too."""
    model, before = tiny.successor(), set(threading.enumerate())
    with pytest.raises(ZeroDivisionError), Engine(model, max_total_tokens=256) as engine:
        engine.generate(input_ids=[1], sampling_params=GREEDY)
        raise ZeroDivisionError

    async def use() -> list[int]:
        async with AsyncLLM(model, max_total_tokens=256) as client:
            result = await client.generate(GenerateReqInput(input_ids=[5], sampling_params=GREEDY))
        assert client.gracefully_exit
        return list(result["output_ids"])

    assert asyncio.run(use()) == [6, 7, 8]
    assert {t for t in threading.enumerate() if t.name.startswith("tokenspeed_rl")} <= before
