"""Aborts end a request wherever it is, at once, with what it has; rids are free again after the end."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tokenspeed_rl import Engine
from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.requests import GenerateReqInput

WAIT = 20.0
ASKED = {
    "return_logprob": True,
    "logprob_kinds": ["sampling", "raw", "processed"],
    "top_logprobs_num": 2,
    "token_ids_logprob": [1, 2],
    "logprob_start_len": 0,
    "return_sampling_mask": True,
    "return_hidden_states": True,
}
LISTS = {
    "output_token_logprobs",
    "output_token_logprobs_raw",
    "output_token_logprobs_processed",
    "output_top_logprobs",
    "output_token_ids_logprobs",
    "sampling_mask",
    "hidden_states",
}


def check_aborted(result: dict[str, Any], prompt: list[int], output: list[int], message: str) -> None:
    """Everything that was asked for is there, for exactly these tokens."""
    meta = result["meta_info"]
    assert result["output_ids"] == output and meta["completion_tokens"] == len(output)
    assert meta["finish_reason"] == {"type": "abort", "message": message}
    assert meta["prompt_tokens"] == len(prompt)
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": len(output)}]
    assert meta["weight_version"] == "default" and meta["e2e_latency"] >= 0
    assert {name: len(meta[name]) for name in LISTS} == dict.fromkeys(LISTS, len(output))
    assert meta["input_token_logprobs"][0] == (None, prompt[0], None)
    assert len(meta["input_token_logprobs"]) == (len(prompt) if output else 1)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_running_request(counter: Engine, tiny: Any, step_gate: Any, pool: Any, steps: int) -> None:
    """C2, G2: an abort wakes the waiter at once, while a step is running, with what was sampled before;
    before the first token every field exists, empty."""
    prompt, params = [5, 6, 7], {"temperature": 0, "max_new_tokens": 50}
    with step_gate(counter) as gate:
        waiter = pool.submit(counter.generate, input_ids=prompt, sampling_params=params, rid="run", **ASKED)
        gate.step(steps)
        gate.wait()
        counter.abort("run")
        check_aborted(waiter.result(WAIT), prompt, list(range(8, 8 + steps)), "aborted")
        assert counter.get_load()[0].num_reqs == 0
    tiny.all_back(counter)
    assert counter.generate(input_ids=prompt, sampling_params={"max_new_tokens": 1})


def test_queued_request(tiny: Any, make_engine: Any, step_gate: Any, pool: Any) -> None:
    """C2: a request that waits for its place ends at once, with no token; the one that runs goes on."""
    engine = make_engine(tiny.successor(), max_running_requests=1)
    params = {"temperature": 0, "max_new_tokens": 4}
    with step_gate(engine) as gate:
        running = pool.submit(engine.generate, input_ids=[5], sampling_params=params)
        gate.step()
        gate.submitted()
        queued = pool.submit(engine.generate, input_ids=[9, 9], sampling_params=params, rid="q", **ASKED)
        gate.submitted()
        gate.step()
        gate.wait()
        load = engine.get_load()[0]
        assert (load.num_reqs, load.num_waiting_reqs) == (2, 1)
        engine.abort("q")
        check_aborted(queued.result(WAIT), [9, 9], [], "aborted")
        gate.open()
    assert running.result(WAIT)["output_ids"] == [6, 7, 8, 9]
    tiny.all_back(engine)


def test_retracted_request(tiny: Any, make_engine: Any, step_gate: Any, pool: Any) -> None:
    """C2: a request that gave up its pages to an older one keeps its tokens, logprobs and spans when it is
    aborted in the queue; the older one ends as if it had been alone."""
    engine = make_engine(tiny.successor(), page_size=4, max_total_tokens=32)
    first, second = [5] * 11, [50] * 7
    with step_gate(engine) as gate:
        old = pool.submit(
            engine.generate, input_ids=first, sampling_params={"temperature": 0, "max_new_tokens": 21}
        )
        gate.submitted()
        params = {"temperature": 0, "max_new_tokens": 25}
        young = pool.submit(engine.generate, input_ids=second, sampling_params=params, rid="young", **ASKED)
        gate.submitted()
        while tiny.state(engine)["num_retractions"] == 0:
            gate.step()
            gate.wait()
        assert tiny.state(engine)["num_waiting"] == 1
        engine.abort("young")
        result = young.result(WAIT)
        gate.open()
    assert len(result["output_ids"]) > 3
    check_aborted(result, second, list(range(51, 51 + len(result["output_ids"]))), "aborted")
    assert old.result(WAIT)["output_ids"] == list(range(6, 27))
    tiny.all_back(engine)


def test_finished_or_unknown_request(counter: Engine, tiny: Any) -> None:
    """C2: aborting what has ended, or never was, does nothing; so does `drop_request_state`."""
    done = counter.generate(
        input_ids=[1], sampling_params={"temperature": 0, "max_new_tokens": 2}, rid="done"
    )
    for rid in ("done", "never was", ""):
        counter.abort(rid)
        counter.client.abort_request(rid)
        counter.client.drop_request_state(rid)
    counter.abort()
    assert done["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    assert counter.generate(input_ids=[1], sampling_params={"temperature": 0, "max_new_tokens": 2})[
        "output_ids"
    ] == [2, 3]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_all_samples_of_a_request(counter: Engine, tiny: Any, step_gate: Any, pool: Any, steps: int) -> None:
    """C9: aborting a request with n = 8 gives eight results and leaves no child and no page behind, whether
    its samples still wait for the shared prompt or run on their own."""
    params = {"n": 8, "max_new_tokens": 100, "seed": 1}
    with step_gate(counter) as gate:
        waiter = pool.submit(counter.generate, input_ids=tiny.prompt(20), sampling_params=params, rid="n8")
        gate.step(steps)
        gate.wait()
        counter.abort("n8")
        results = waiter.result(WAIT)
        assert counter.get_load()[0].num_reqs == 0
    assert [r["meta_info"]["index"] for r in results] == list(range(8))
    assert {r["meta_info"]["id"] for r in results} == {"n8"}
    assert [len(r["output_ids"]) for r in results] == [steps] * 8
    assert {r["meta_info"]["finish_reason"]["type"] for r in results} == {"abort"}
    tiny.all_back(counter)


def test_leader_of_a_shared_prompt(tiny: Any, make_engine: Any, step_gate: Any, pool: Any) -> None:
    """Aborting the request that computes a prompt for others, in the middle of its prefill, leaves those
    unharmed: they give what they give alone."""
    engine = make_engine(tiny.successor(), chunked_prefill_size=8, page_size=4)
    prompt, params = list(range(100, 130)), {"temperature": 0, "max_new_tokens": 5}
    with step_gate(engine) as gate:
        leader = pool.submit(engine.generate, input_ids=prompt, rid="leader", sampling_params=params)
        gate.submitted()
        followers = [pool.submit(engine.generate, input_ids=prompt, sampling_params=params) for _ in range(3)]
        gate.submitted(3)
        gate.step(2)
        gate.wait()
        assert tiny.state(engine)["num_running"] == 4
        engine.abort("leader")
        assert leader.result(WAIT)["output_ids"] == []
        gate.open()
        results = [follower.result(WAIT) for follower in followers]
    assert [result["output_ids"] for result in results] == [list(range(130, 135))] * 3
    tiny.all_back(engine)


def test_one_of_a_batch_and_all(counter: Engine, tiny: Any, step_gate: Any, pool: Any) -> None:
    """In a batch an abort ends one prompt's samples; without a rid it ends everything, the queue included."""
    params = {"temperature": 0, "max_new_tokens": 4}
    with step_gate(counter) as gate:
        batch = pool.submit(
            counter.generate, input_ids=[[1], [2], [3]], rid=["a", "b", "c"], sampling_params=params
        )
        gate.step(2)
        gate.wait()
        counter.abort("b")
        gate.open()
        results = batch.result(WAIT)
    assert [r["output_ids"] for r in results] == [[2, 3, 4, 5], [3, 4], [4, 5, 6, 7]]
    with step_gate(counter) as gate:
        waiters = [pool.submit(counter.generate, input_ids=[t], sampling_params=params) for t in range(4)]
        gate.submitted(4)
        counter.abort()
        assert {w.result(WAIT)["meta_info"]["finish_reason"]["type"] for w in waiters} == {"abort"}
    tiny.all_back(counter)


def test_rids(counter: Engine, step_gate: Any) -> None:
    """A rid that is live, or repeated within a call, is refused and nothing of the call is queued; after its
    end, also by an abort while the step still runs, it can be used again."""
    params = {"temperature": 0, "max_new_tokens": 3}
    with step_gate(counter) as gate:
        first = counter.generate(input_ids=[1], rid="r", sampling_params=params, stream=True)
        gate.wait()
        with pytest.raises(RequestError, match="live request"):
            counter.generate(input_ids=[2], rid="r", sampling_params=params)
        with pytest.raises(RequestError, match="live request"):
            counter.generate(input_ids=[[2], [3]], rid=["s", "r"], sampling_params=params)
        with pytest.raises(RequestError, match="differ"):
            counter.generate(input_ids=[[2], [3]], rid=["s", "s"], sampling_params=params)
        assert counter.get_load()[0].num_reqs == 1
        counter.abort("r")
        again = counter.generate(input_ids=[20], rid="r", sampling_params=params, stream=True)
        with pytest.raises(RequestError, match="live request"):
            counter.generate(input_ids=[2], rid="r", sampling_params=params)
        gate.open()
        assert [m["output_ids"] for m in first] == [[]]
        assert [t for m in again for t in m["output_ids"]] == [21, 22, 23]
    for _ in range(2):
        assert counter.generate(input_ids=[5], rid="r", sampling_params=params)["output_ids"] == [6, 7, 8]


def test_dropping_the_state_of_a_live_request(counter: Engine, step_gate: Any, pool: Any) -> None:
    """`drop_request_state` aborts a live request, and its rid is free at once."""
    with step_gate(counter) as gate:
        waiter = pool.submit(counter.generate, input_ids=[1], rid="drop")
        gate.submitted()
        counter.client.drop_request_state("drop")
        assert waiter.result(WAIT)["meta_info"]["finish_reason"]["type"] == "abort"
        with pytest.raises(RequestError, match="wants"):
            counter.generate(input_ids=[1], rid="drop", sampling_params={"n": "wants a number"})
        stream = counter.client.generate_request(GenerateReqInput(input_ids=[1], rid="drop"))
        asyncio.run(stream.aclose())


def test_an_abort_while_nothing_may_run(tiny: Any, make_engine: Any, pool: Any) -> None:
    """An abort wakes its waiter and returns the pages also while the weights are invalid and no step runs."""
    model = tiny.successor()
    engine = make_engine(model)
    engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 1})
    submitted = threading.Event()
    loop = engine.client._core.loop
    submit = loop.submit
    loop.submit = lambda *args: (submit(*args), submitted.set())
    model.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(Exception, match="hook"):
        engine.weights_changed()
    waiter = pool.submit(engine.generate, input_ids=[3], rid="w", wait=True)
    assert submitted.wait(WAIT)
    assert engine.get_load()[0].num_waiting_reqs == 1
    engine.abort("w")
    assert waiter.result(WAIT)["output_ids"] == []
    tiny.all_back(engine)


def test_abort_against_the_end(counter: Engine, tiny: Any) -> None:
    """C7: an abort that races the last token: the result is whole, either `length` with every token or
    `abort` with a beginning of them, and the engine is clean after 60 such races."""
    lengths, barrier = [], threading.Barrier(2)

    def abort() -> None:
        for number in range(60):
            barrier.wait(WAIT)
            for _ in range(number % 20):
                tiny.state(counter)  # a while that differs from round to round
            counter.abort(f"race{number}")

    thread = threading.Thread(target=abort)
    thread.start()
    params = {"temperature": 0, "max_new_tokens": 6, "n": 2}
    for number in range(60):
        barrier.wait(WAIT)
        for result in counter.generate(input_ids=[10], rid=f"race{number}", sampling_params=params):
            reason = result["meta_info"]["finish_reason"]["type"]
            assert result["output_ids"] == list(range(11, 17))[: len(result["output_ids"])]
            assert (reason == "length") == (len(result["output_ids"]) == 6)
            lengths.append(len(result["output_ids"]))
    thread.join(WAIT)
    assert len(lengths) == 120
    tiny.all_back(counter)
