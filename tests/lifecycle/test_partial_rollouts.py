"""Samples that live through pauses, sleep and updates: every token is that of the weights its span names."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lifecycle.rollouts import (
    EXACT,
    Forwards,
    ask,
    frozen_gap,
    frozen_logprobs,
    labels,
    owner,
    pause_at,
    push,
    so_far,
    span_gap,
    take,
)
from tests.step_gate import StepGate
from tests.tiny import Tiny

FIELDS = ("output_token_logprobs", "output_token_logprobs_raw", "output_top_logprobs", "sampling_mask")
TOLD: dict[str, Any] = {
    "logprob_kinds": ["sampling", "raw"],
    "top_logprobs_num": 2,
    "return_sampling_mask": True,
}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """Weights by label; nobody writes them."""
    return {f"W{seed}": Tiny.model("qwen3", seed=seed) for seed in range(4)}


ORDERS = [
    ["update", "resume"],
    ["release", "wake", "update", "resume"],
    ["release", "wake weights", "update", "wake", "resume"],
    ["release", "wake weights", "resume", "update", "wake"],
    ["update", "release kv", "wake", "resume"],
    ["resume", "update"],
    ["release", "resume", "wake", "update"],
    ["update", "update", "resume"],
    ["release kv", "update", "retract", "wake", "resume"],
    ["keep", "update", "retract", "resume"],
]


@pytest.mark.parametrize("mode", ["retract", "keep"])
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_orders(make_engine: Any, models: Any, pool: Any, mode: str, order: list[str]) -> None:
    """C6, C10: whatever the order of release, wake, update and resume under a pause, tokens sampled before
    stay as they were, bit for bit, all tokens' logprobs are those of a full recompute under their spans (with
    `keep` without a dropped cache: over the KV that was kept), and no sample exceeds max_new_tokens."""
    engine = owner(make_engine, models["W0"], chunked_prefill_size=8)
    prompts = [Tiny.prompt(length, seed=length) for length in (5, 11, 30)]
    with StepGate(engine) as gate:
        with Tiny.held(engine):
            streams = [ask(engine, prompt, TOLD, max_new_tokens=9) for prompt in prompts]
        pause_at(engine, gate, pool, mode, 4)
        before = so_far(*streams)
        computed = [stream._requests[0].computed for stream in streams]
        assert 0 < len(before[0][0]) < 9 and before[2][0] == []  # decoding, and half prefilled
        version, dropped = 0, mode == "retract"
        for act in order:
            if act == "update":
                version += 1
                push(engine, models[f"W{version}"], f"W{version}")
                if not engine.is_paused():
                    dropped = True
            elif act == "resume":
                gate.open()
                engine.resume()
            elif act in ("keep", "retract"):
                assert engine.pause(act)
                dropped = dropped or act == "retract"
            elif act.startswith("release"):
                engine.release_memory_occupation("kv_cache" if act == "release kv" else None)
                dropped = True
            else:
                engine.resume_memory_occupation("weights" if act == "wake weights" else None)
            if order.index("resume") > order.index(act):
                assert so_far(*streams) == before
        results = take(engine, *streams)
    for prompt, result, (ids, logprobs, _), rows in zip(prompts, results, before, computed, strict=True):
        assert len(result["output_ids"]) == 9 == result["meta_info"]["finish_reason"]["length"]
        assert result["output_ids"][: len(ids)] == ids
        for kind, name in (("sampling", FIELDS[0]), ("raw", FIELDS[1])):
            values = [value for value, _, _ in result["meta_info"][name]]
            assert values[: len(ids)] == logprobs.get(kind, [])
        assert {len(result["meta_info"][field]) for field in FIELDS} == {9}
        if dropped:
            assert span_gap(models, prompt, result) < EXACT
        else:
            assert frozen_gap(prompt, result, (models["W0"], rows), (models[f"W{version}"], 0)) < EXACT
    if order[-1] == "resume" and mode == "retract":
        assert labels(results[0]) == [("W0", 0, len(before[0][0])), (f"W{version}", len(before[0][0]), 9)]
        assert labels(results[2]) == [(f"W{version}", 0, 9)]
    Tiny.all_back(engine)


@pytest.mark.parametrize("mode", ["retract", "keep"])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6], ids=lambda n: f"after {n}")
def test_groups_of_eight(make_engine: Any, models: Any, pool: Any, mode: str, steps: int) -> None:
    """D5, C6: a group of 8 that is paused, updated and resumed while its shared prompt is half prefilled, or
    just forked, or decoding: eight different samples, each exact; the prompt's logprobs are those of the
    weights that computed them; the prefix cache gets no KV of two epochs."""
    engine = owner(make_engine, models["W0"], chunked_prefill_size=8)
    prompt = Tiny.prompt(22)
    with StepGate(engine) as gate:
        group = ask(engine, prompt, {"logprob_start_len": 0}, n=8, max_new_tokens=6)
        pause_at(engine, gate, pool, mode, steps)
        requests = group._requests
        sampled = max(0, steps - 2)
        rows = min(8 * steps, 22 + max(0, sampled - 1))
        assert requests[0].output_len == sampled
        assert requests[0].computed == (rows if mode == "keep" else 0)
        push(engine, models["W1"], "W1", flush_cache=False)
        gate.open()
        engine.resume()
        results = take(engine, group)
    assert len({tuple(result["output_ids"]) for result in results}) > 4
    for result in results:
        ids = [*prompt, *result["output_ids"]]
        assert labels(result) == [("W0", 0, sampled)] * (sampled > 0) + [("W1", sampled, 6)]
        told = [value for value, _, _ in result["meta_info"]["input_token_logprobs"][1:]]
        if mode == "retract":
            assert span_gap(models, prompt, result) < EXACT
            expected = Tiny.ref_logprobs(models["W0" if sampled else "W1"], prompt)
        else:
            parts = (models["W0"], rows), (models["W1"], 0)
            assert frozen_gap(prompt, result, *parts) < EXACT
            expected = frozen_logprobs(ids, parts[0], (models["W1"], len(ids)))[: len(prompt) - 1]
        assert max(abs(a - b) for a, b in zip(told, expected, strict=True)) < EXACT
    again = take(engine, ask(engine, prompt))
    assert span_gap(models, prompt, again) < EXACT
    Tiny.all_back(engine)


def test_a_kept_prompt_that_loses_its_leader(make_engine: Any, models: Any, pool: Any) -> None:
    """Requests that wait for another's half-prefilled prompt, kept across an update, start over when that one
    is aborted: wholly under the new weights, and theirs is KV that the prefix cache may keep."""
    engine = owner(make_engine, models["W0"], chunked_prefill_size=8)
    prompt = Tiny.prompt(22)
    with StepGate(engine) as gate:
        with Tiny.held(engine):
            leader = ask(engine, prompt, {"rid": "leader"})
            followers = [ask(engine, prompt, seed=seed) for seed in range(2)]
        pause_at(engine, gate, pool, "keep", 2)
        assert Tiny.state(engine)["num_running"] == 3
        push(engine, models["W1"], "W1")
        engine.abort("leader")
        assert take(engine, leader)["output_ids"] == []
        gate.open()
        engine.resume()
        results = take(engine, *followers)
    assert all(span_gap(models, prompt, result) < EXACT for result in results)
    again = take(engine, ask(engine, prompt))
    assert again["meta_info"]["cached_tokens"] == 20 and span_gap(models, prompt, again) < EXACT
    Tiny.all_back(engine)


def test_many_resumptions(make_engine: Any, models: Any, pool: Any) -> None:
    """C10: paused and updated after every single token: exactly max_new_tokens tokens, one span each, ids
    prefix-stable, draws those of the request's own seed."""
    engine = owner(make_engine, models["W0"])
    prompt, seen = Tiny.prompt(6), []
    with StepGate(engine) as gate:
        stream = ask(engine, prompt, max_new_tokens=7, seed=5)
        for turn in range(1, 7):
            pause_at(engine, gate, pool, ("retract", "keep")[turn % 2], 1)
            if turn % 2:
                assert engine.pause("retract")
            seen.append(so_far(stream)[0][0])
            push(engine, models[f"W{turn % 4}"], f"W{turn % 4}")
            engine.resume()
        gate.open()
        result = take(engine, stream)
    assert [len(ids) for ids in seen] == [1, 2, 3, 4, 5, 6]
    assert all(result["output_ids"][: len(ids)] == ids for ids in seen)
    assert labels(result) == [(f"W{turn % 4}", turn, turn + 1) for turn in range(7)]
    assert span_gap(models, prompt, result) < EXACT


def test_nothing_is_computed_twice_under_keep(make_engine: Any, models: Any, pool: Any) -> None:
    """A resumed `keep` goes on with the very next token, also when the weights were discarded and updated."""
    engine = owner(make_engine, models["W0"])
    with StepGate(engine) as gate:
        with Tiny.held(engine):
            streams = [ask(engine, Tiny.prompt(9, seed=seed), max_new_tokens=5) for seed in range(3)]
        pause_at(engine, gate, pool, "keep", 2)
        engine.release_memory_occupation("weights")
        engine.resume_memory_occupation("weights")
        push(engine, models["W1"], "W1")
        gate.open()
        forwards = Forwards(engine)
        engine.resume()
        results = take(engine, *streams)
    assert (forwards.count, forwards.tokens) == (3, 9)
    for seed, result in enumerate(results):
        assert frozen_gap(Tiny.prompt(9, seed=seed), result, (models["W0"], 10), (models["W1"], 0)) < EXACT
