"""Samples that live through pauses, sleep and updates where pages run out."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest

from tests.lifecycle.rollouts import (
    EXACT,
    WAIT,
    ask,
    begin,
    frozen_gap,
    frozen_logprobs,
    labels,
    owner,
    pause_at,
    push,
    reason,
    settled,
    so_far,
    span_gap,
    take,
)
from tests.step_gate import StepGate
from tests.tiny import Tiny
from tokenspeed_rl.errors import EngineStateError


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """Weights by label; nobody writes them."""
    return {f"W{seed}": Tiny.model("qwen3", seed=seed) for seed in range(4)}


@pytest.mark.parametrize("mode", ["retract", "keep"])
def test_three_times_the_pool(make_engine: Any, models: Any, pool: Any, mode: str) -> None:
    """C3: a KV pool that holds a third of what is asked for, retractions all the time, and an update after
    every few steps under a pause: every output has its length and equals the reference under its spans; under
    `keep` that goes for those which gave up their pages meanwhile."""
    engine = owner(make_engine, models["W0"], max_total_tokens=96, chunked_prefill_size=16)
    prompts = [Tiny.prompt(8 + number % 5, seed=number) for number in range(12)]
    with StepGate(engine) as gate:
        with Tiny.held(engine):
            streams = [ask(engine, prompt, max_new_tokens=12, seed=1) for prompt in prompts]
        for version in (1, 2, 3):
            pause_at(engine, gate, pool, mode, 7)
            push(engine, models[f"W{version}"], f"W{version}")
            engine.resume()
        gate.open()
        results = take(engine, *streams)
    assert Tiny.state(engine)["num_retractions"] > 0
    assert {len(result["output_ids"]) for result in results} == {12}
    assert {reason(result) for result in results} == {"length"}
    exact = [span_gap(models, p, r) < EXACT for p, r in zip(prompts, results, strict=True)]
    if mode == "retract":
        assert all(exact)
        assert max(len(labels(result)) for result in results) > 1
    else:
        whole = [len(labels(result)) == 1 for result in results]
        assert all(fine for fine, one in zip(exact, whole, strict=True) if one) and any(whole)
    Tiny.all_back(engine)


def test_kept_requests_are_preempted_last(make_engine: Any, models: Any, pool: Any) -> None:
    """Contract 9: where pages run out, those whose KV was kept across an update give theirs up last, though
    younger; one that has to is computed again under the current weights and is exact from there on."""
    engine = owner(make_engine, models["W0"], max_total_tokens=64, chunked_prefill_size=64)
    prompts = [Tiny.prompt(9, seed=seed) for seed in range(4)]
    retracted: list[Any] = []
    scheduler: Any = engine.client._core.scheduler
    retract = scheduler.retract
    scheduler.retract = lambda request: (retracted.append((request, request.mixed)), retract(request))
    with StepGate(engine) as gate:
        with Tiny.held(engine):
            kept = [ask(engine, prompt, max_new_tokens=40) for prompt in prompts[:2]]
        pause_at(engine, gate, pool, "keep", 3)
        push(engine, models["W1"], "W1")
        assert [stream._requests[0].mixed for stream in kept] == [True, True]
        new = [ask(engine, prompt, max_new_tokens=20) for prompt in prompts[2:]]
        gate.open()
        engine.resume()
        results = take(engine, *kept, *new)
    oldest, younger = (stream._requests[0] for stream in kept)
    assert [request for request, mixed in retracted if mixed] == [younger]  # the two don't fit together
    at = next(number for number, (request, _) in enumerate(retracted) if request is younger)
    assert at > 0 and not any(request is oldest for request, _ in retracted)
    assert frozen_gap(prompts[0], results[0], (models["W0"], 11), (models["W1"], 0)) < EXACT
    assert [len(result["output_ids"]) for result in results] == [40, 40, 20, 20]
    for prompt, result in zip(prompts[2:], results[2:], strict=True):
        assert span_gap(models, prompt, result) < EXACT
    ids = [*prompts[1], *results[1]["output_ids"]]
    expected = Tiny.ref_logprobs(models["W1"], ids)[len(prompts[1]) - 1 :]
    values = [value for value, _, _ in results[1]["meta_info"]["output_token_logprobs"]]
    frozen = frozen_logprobs(ids, (models["W0"], 11), (models["W1"], len(ids)))[len(prompts[1]) - 1 :]
    as_kept = [abs(value - ref) < EXACT for value, ref in zip(values, frozen, strict=True)]
    anew = [abs(value - ref) < EXACT for value, ref in zip(values, expected, strict=True)]
    turn = next(number for number in range(40) if all(anew[number:]))
    assert all(as_kept[:turn]) and 3 < turn < 40
    Tiny.all_back(engine)


def test_a_kept_request_outlasts_an_older_one(make_engine: Any, models: Any, pool: Any) -> None:
    """Contract 9: a kept request keeps its pages though the one that has to give them up came before it."""
    engine = owner(make_engine, models["W0"], max_total_tokens=64, max_running_requests=2)
    prompts = [Tiny.prompt(9, seed=seed) for seed in range(3)]
    with StepGate(engine) as gate:
        with Tiny.held(engine):
            old = ask(engine, prompts[0], max_new_tokens=40)
            first = [
                ask(engine, p, {"priority": 1}, max_new_tokens=n)
                for p, n in zip(prompts[1:], (5, 40), strict=True)
            ]
        pause_at(engine, gate, pool, "keep", 3)
        push(engine, models["W1"], "W1")
        gate.open()
        engine.resume()
        late, _, kept = take(engine, old, *first)
    assert Tiny.state(engine)["num_retractions"] > 0
    assert frozen_gap(prompts[2], kept, (models["W0"], 11), (models["W1"], 0)) < EXACT
    assert labels(late) == [("W1", 0, 40)] and span_gap(models, prompts[0], late) < EXACT
    Tiny.all_back(engine)


@pytest.mark.parametrize("seed", range(6))
def test_at_random(make_engine: Any, models: Any, pool: Any, seed: int) -> None:
    """C3, C6, C10: random acts between random steps of random requests in a small pool: all end at their
    length, prefix-stable, exact under their spans unless they were kept across an update."""
    rng = random.Random(seed)
    engine = owner(
        make_engine, models["W0"], max_total_tokens=160, chunked_prefill_size=12, weights_backup="cpu"
    )
    asked: list[tuple[list[int], int, Any]] = []
    kept: set[Any] = set()
    version = 0

    def update() -> None:
        nonlocal version
        version = (version + 1) % 4
        push(engine, models[f"W{version}"], f"W{version}", flush_cache=rng.random() < 0.5)
        kept.update(r for r in engine.client._core.scheduler.running if r.mixed)

    acts: list[Any] = [
        update,
        lambda: engine.pause("keep"),
        lambda: engine.pause("retract"),
        lambda: engine.release_memory_occupation(rng.choice(["kv_cache", "weights", None])),
        lambda: engine.resume_memory_occupation(rng.choice(["kv_cache", "weights", None])),
        engine.flush_cache,
    ]
    loop: Any = engine.client._core.loop
    for _ in range(5):
        mode = rng.choice(["keep", "retract"])
        with Tiny.held(engine):
            for _ in range(rng.randrange(3)):
                prompt, n = Tiny.prompt(rng.randrange(3, 30), seed=rng.randrange(4)), rng.choice([1, 1, 3])
                asked.append((prompt, n, ask(engine, prompt, n=n, max_new_tokens=rng.randrange(2, 20))))
            live = [r for *_, stream in asked for r in stream._requests if not r.finished]
            most = max((r.max_new_tokens - r.output_len for r in live), default=0)
            if most:
                paused = Tiny.after_step(
                    engine, rng.randint(1, min(most, 5)), lambda mode=mode: engine.pause(mode)
                )
            begin(engine, pool, engine.resume)
        if most:
            assert paused.result(WAIT) is True
            del loop.runner.run, loop._post
        else:
            settled(engine)
            engine.pause(mode)
        before = so_far(*(stream for *_, stream in asked))
        for act in rng.choices(acts, k=rng.randrange(1, 6)):
            with suppress(EngineStateError):  # what is asleep already, or awake
                act()
        assert so_far(*(stream for *_, stream in asked)) == before
        engine.resume_memory_occupation()
    engine.resume()
    for prompt, n, stream in asked:
        results = take(engine, stream)
        for request, result in zip(stream._requests, results if n > 1 else [results], strict=True):
            assert len(result["output_ids"]) == request.max_new_tokens
            if request not in kept:
                assert span_gap(models, prompt, result) < EXACT
    Tiny.all_back(engine)
