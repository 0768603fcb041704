"""Any number of threads and event loops at once: nobody waits for another's step, nothing is mixed up."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from tokenspeed_rl import Engine
from tokenspeed_rl.errors import EngineTimeoutError, RequestError
from tokenspeed_rl.requests import GenerateReqInput, GetWeightsByNameReqInput

WAIT = 20.0
GREEDY = {"temperature": 0, "max_new_tokens": 6}


def after(token: int, count: int) -> list[int]:
    return [(token + 1 + at) % 256 for at in range(count)]


def refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="non-empty"):
        engine.generate(input_ids=[])


STATUS = {
    "get_load": lambda e: e.get_load()[0].num_reqs,
    "get_internal_state": lambda e: e.get_internal_state()[0]["num_running"],
    "is_paused": lambda e: e.is_paused(),
    "is_sleeping": lambda e: e.is_sleeping(),
    "abort of another": lambda e: e.abort("nobody"),
    "is_server_starting": lambda e: e.client.is_server_starting(),
    "is_scheduler_paused": lambda e: asyncio.run(e.client.is_scheduler_paused()),
    "async get_load": lambda e: asyncio.run(e.client.get_load())[0].num_reqs,
    "last_receive_tstamp": lambda e: e.client.last_receive_tstamp,
    "named_parameters": lambda e: len(list(e.named_parameters())),
    "refused request": refused,
    "new request": lambda e: e.generate(input_ids=[1], stream=True),
    "abort": lambda e: e.abort("blocked"),
}


@pytest.mark.parametrize("name", STATUS)
def test_status_and_abort_during_a_step(counter: Engine, step_gate: Any, pool: Any, name: str) -> None:
    """G2: while a step of thread A's call runs, status and abort from thread B return within a second."""
    with step_gate(counter) as gate:
        blocked = pool.submit(counter.generate, input_ids=[3], rid="blocked", sampling_params=GREEDY)
        gate.wait()
        began = time.monotonic()
        pool.submit(STATUS[name], counter).result(WAIT)
        assert time.monotonic() - began < 1.0
        gate.open()
    assert blocked.result(WAIT)["output_ids"] == ([] if name == "abort" else after(3, 6))


def test_commands_wait_for_the_step_only(counter: Engine, step_gate: Any, pool: Any) -> None:
    """Control calls made during a step are served right after it, in order, not after the request."""
    with step_gate(counter) as gate:
        running = pool.submit(counter.generate, input_ids=[3], sampling_params=GREEDY)
        gate.step()
        gate.wait()
        flush = pool.submit(counter.flush_cache)
        changed = pool.submit(counter.weights_changed, "v2")
        read = pool.submit(counter.get_weights_by_name, "model.norm.weight", 3)
        gate.commanded(3)
        assert not flush.done() and not changed.done() and not read.done()
        gate.step()
        assert flush.result(WAIT).success and changed.result(WAIT).version == "v2"
        assert read.result(WAIT) == [1.0, 1.0, 1.0]
        assert not running.done()
        gate.open()
    assert running.result(WAIT)["output_ids"] == after(3, 6)


def test_many_threads_get_their_own(counter: Engine, tiny: Any, pool: Any) -> None:
    """Results of 12 threads that generate at once, blocking, awaiting and streaming, single and in lists, go
    to those who asked."""

    def blocking(token: int) -> list[list[int]]:
        return [counter.generate(input_ids=[token], sampling_params=GREEDY)["output_ids"]]

    def batch(token: int) -> list[list[int]]:
        results = counter.generate(input_ids=[[token], [token, token]], sampling_params=GREEDY)
        return [result["output_ids"] for result in results]

    def streaming(token: int) -> list[list[int]]:
        stream = counter.generate(input_ids=[token], sampling_params=GREEDY, stream=True)
        return [[t for message in stream for t in message["output_ids"]]]

    def awaiting(token: int) -> list[list[int]]:
        async def three() -> list[Any]:
            calls = [counter.async_generate(input_ids=[token], sampling_params=GREEDY) for _ in range(3)]
            return await asyncio.gather(*calls)

        return [result["output_ids"] for result in asyncio.run(three())]

    kinds = [blocking, batch, streaming, awaiting]
    tokens = [random.Random(1).randrange(256) for _ in range(120)]
    found = list(pool.map(lambda at: kinds[at % 4](tokens[at]), range(120)))
    for at, outputs in enumerate(found):
        assert outputs == [after(tokens[at], 6)] * [1, 2, 1, 3][at % 4]
    tiny.all_back(counter)


@pytest.mark.parametrize("use_tqdm", [False, True])
def test_timeout(counter: Engine, tiny: Any, step_gate: Any, capsys: Any, use_tqdm: bool) -> None:
    """A timeout aborts its request and raises EngineTimeoutError, also while a step is stuck; every page
    comes back and the rid is free again."""
    params = {"max_new_tokens": 200, "n": 2}
    with step_gate(counter) as gate:
        with pytest.raises(EngineTimeoutError, match="aborted"):
            counter.generate(
                input_ids=[[1], [2]],
                rid=["t", "u"],
                sampling_params=params,
                timeout=0.05,
                use_tqdm=use_tqdm,
            )
        assert counter.get_load()[0].num_reqs == 0
        gate.wait()
        stream = counter.generate(input_ids=[1], rid="t", sampling_params=GREEDY, stream=True)
        gate.open()
        assert [t for message in stream for t in message["output_ids"]] == after(1, 6)
    tiny.all_back(counter)
    assert counter.generate(input_ids=[1], sampling_params=GREEDY, timeout=WAIT)["output_ids"] == after(1, 6)


def test_timeouts_of_the_other_faces(counter: Engine, tiny: Any, step_gate: Any) -> None:
    """`async_generate(timeout=)`, `LLM.generate(timeout)`, `LLM.run(timeout)` and `asyncio.wait_for` do the
    same, each with its own error; a timeout of a control call leaves the engine whole."""
    obj = GenerateReqInput(input_ids=[1], rid="w", sampling_params={"max_new_tokens": 200})
    with step_gate(counter) as gate:
        with pytest.raises(EngineTimeoutError):
            asyncio.run(counter.async_generate(input_ids=[1], rid="w", timeout=0.02))
        gate.wait()
        with pytest.raises(EngineTimeoutError):
            counter.llm.generate(obj, timeout=0.02)
        with pytest.raises(EngineTimeoutError):
            counter.llm.run(counter.client.generate(obj), timeout=0.02)
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(counter.async_generate(input_ids=[1], rid="w"), 0.02))
        with pytest.raises(EngineTimeoutError):
            counter.llm.run(counter.client.weights_changed("late"), timeout=0.02)
        gate.open()
    tiny.all_back(counter)
    assert tiny.state(counter)["weight_version"] != "late", "a command withdrawn before its turn does nothing"
    assert counter.generate(input_ids=[1], rid="w", sampling_params=GREEDY)["output_ids"] == after(1, 6)


def test_cancelled_calls_wedge_nothing(counter: Engine, tiny: Any, step_gate: Any) -> None:
    """G7: tasks cancelled while they wait for a result or for a control call end at once; those beside them,
    and the engine, go on."""

    async def cancel_some() -> list[int]:
        client = counter.client
        doomed = [
            asyncio.create_task(coro)
            for coro in (
                counter.async_generate(input_ids=[[1], [2]], sampling_params={"n": 3}),
                client.flush_cache(),
                client.weights_changed("never"),
                client.weights_checksum(),
                client.get_weights_by_name(GetWeightsByNameReqInput(name="model.norm.weight")),
            )
        ]
        beside = asyncio.create_task(counter.async_generate(input_ids=[7], sampling_params=GREEDY))
        await asyncio.sleep(0)
        for task in doomed:
            task.cancel()
        for task in doomed:
            with pytest.raises(asyncio.CancelledError):
                await task
        gate.open()
        return list((await beside)["output_ids"])

    counter.weights_changed("before")
    with step_gate(counter) as gate:
        held = counter.generate(input_ids=[9], sampling_params=GREEDY, stream=True)
        gate.wait()
        assert asyncio.run(cancel_some()) == after(7, 6)
        assert [t for message in held for t in message["output_ids"]] == after(9, 6)
    assert tiny.state(counter)["weight_version"] == "before"
    tiny.all_back(counter)


def test_cancellation_against_the_result(counter: Engine, tiny: Any) -> None:
    """A cancellation that races the result: the caller gets one or the other, 60 times; nothing is left."""
    outcomes: Counter[str] = Counter()

    async def race(delay: int) -> None:
        task = asyncio.create_task(counter.async_generate(input_ids=[5], sampling_params=GREEDY))
        for _ in range(delay):
            await asyncio.sleep(0)
        task.cancel()
        try:
            assert (await task)["output_ids"] == after(5, 6)
            outcomes["result"] += 1
        except asyncio.CancelledError:
            outcomes["cancelled"] += 1

    async def races() -> None:
        for number in range(60):
            await race(1 + 40 * number)

    asyncio.run(races())
    assert outcomes.total() == 60
    tiny.all_back(counter)


def test_hammer(tiny: Any, make_engine: Any, pool: Any) -> None:
    """Eight threads generate, stream, time out, abort, flush, change the weights and read the state, 25 times
    each, on a cache too small for all: every output is right, or a right beginning where it was aborted,
    and at the end every page is back."""
    engine = make_engine(tiny.successor(), page_size=4, max_total_tokens=160, max_running_requests=6)
    engine.generate(input_ids=[1], sampling_params=GREEDY)  # maps the cache
    barrier, seen = threading.Barrier(8), Counter[str]()

    def check(prompt: list[int], result: dict[str, Any]) -> None:
        reason = result["meta_info"]["finish_reason"]["type"]
        output = result["output_ids"]
        assert output == after(prompt[-1], len(output))
        assert (len(output) == 12) == (reason == "length")
        spans = result["meta_info"]["weight_versions"]
        assert spans[0]["start"] == 0 and spans[-1]["end"] == len(output)
        assert all(a["end"] == b["start"] for a, b in pairwise(spans))
        assert len(result["meta_info"]["output_token_logprobs"]) == len(output)
        seen[reason] += 1

    def work(worker: int) -> int:
        rng = random.Random(worker)
        barrier.wait(WAIT)
        for turn in range(25):
            prompt = [rng.randrange(256)] * rng.randrange(1, 24)
            params = {"temperature": 0, "max_new_tokens": 12, "n": rng.choice([1, 1, 3])}
            ask = dict(input_ids=[prompt], sampling_params=params, return_logprob=True)
            action = rng.choice(
                ["plain", "plain", "stream", "leave", "timeout", "abort", "flush", "changed", "state"]
            )
            rid = f"{worker}-{turn}"
            if action == "plain":
                for result in engine.generate(**ask, rid=[rid]):
                    check(prompt, result)
            elif action == "stream":
                tokens: dict[int, list[int]] = {}
                for message in engine.generate(**ask, stream=True, priority=rng.randrange(3)):
                    tokens.setdefault(message["index"], []).extend(message["output_ids"])
                assert all(output == after(prompt[-1], len(output)) for output in tokens.values())
            elif action == "leave":
                next(engine.generate(**ask, stream=True))
            elif action == "timeout":
                try:
                    engine.generate(**ask, timeout=rng.random() / 50)
                except EngineTimeoutError:
                    seen["timeout"] += 1
            elif action == "abort":
                engine.abort(
                    rng.choice([f"{rng.randrange(8)}-{turn}", None, f"{rng.randrange(8)}-{turn - 1}"])
                )
            elif action == "flush":
                assert engine.flush_cache().success
            elif action == "changed":
                engine.weights_changed()
            else:
                pages, load = tiny.state(engine)["pages"], engine.get_load()[0]
                assert 0 <= pages["free"] <= pages["total"] == 40 and load.num_waiting_reqs <= load.num_reqs
        return 25

    assert sum(pool.map(work, range(8))) == 200
    assert seen["length"] > 30, seen
    tiny.all_back(engine)
    assert engine.generate(input_ids=[1], sampling_params=GREEDY)["output_ids"] == after(1, 6)


def test_shared_fields_of_several_calls(counter: Engine, pool: Any) -> None:
    """One request struct and one SamplingParams used by several threads at once are only read."""
    obj = GenerateReqInput(input_ids=[[1], [2]], sampling_params={**GREEDY, "n": 2, "seed": 5})
    found = list(pool.map(lambda _: counter.llm.generate(obj), range(12)))
    assert [[r["output_ids"] for r in results] for results in found] == [
        [after(1, 6), after(1, 6), after(2, 6), after(2, 6)]
    ] * 12
    assert obj == GenerateReqInput(input_ids=[[1], [2]], sampling_params={**GREEDY, "n": 2, "seed": 5})
