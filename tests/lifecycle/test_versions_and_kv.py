"""Which weights a token is of, and whose KV it may have read."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from tests.lifecycle.rollouts import (
    EXACT,
    WAIT,
    ask,
    begin,
    begin_update,
    frozen_gap,
    labels,
    owner,
    push,
    reason,
    span_gap,
    take,
)
from tests.step_gate import StepGate
from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.weights import flatten

TIED: dict[str, Any] = {"tie_word_embeddings": True}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """Weights by label; nobody writes them."""
    return {f"W{seed}": Tiny.model(seed=seed) for seed in range(3)}


def write_in_place(engine: Engine, model: Any, label: str, _: Path) -> Any:
    """What a trainer that shares its module does."""
    module = engine.client._core.source.shared.module
    with torch.no_grad():
        for mine, other in zip(module.parameters(), model.parameters(), strict=True):
            mine.copy_(other)
    return engine.weights_changed(label)


def from_disk(engine: Engine, model: Any, label: str, path: Path) -> Any:
    """Out of a checkpoint."""
    model.save_pretrained(path / label)
    return engine.update_weights_from_disk(str(path / label), weight_version=label)


def named(model: Any) -> dict[str, Any]:
    """The named parameters."""
    return dict(model.named_parameters())


PATHS: dict[str, Any] = {
    "mapping": lambda e, m, label, _: push(e, m, label),
    "iterator": lambda e, m, label, _: e.update_weights_from_tensor(
        m.named_parameters(), weight_version=label
    ),
    "atomic": lambda e, m, label, _: push(e, m, label, atomic=True),
    "bucket": lambda e, m, label, _: e.update_weights_from_tensor(
        flatten(named(m).items()), weight_version=label
    ),
    "bytes": lambda e, m, label, _: e.update_weights_from_tensor(
        serialized_named_tensors=[save({k: v.detach() for k, v in named(m).items()})], weight_version=label
    ),
    "partials": lambda e, m, label, _: [
        e.update_weights_from_tensor(dict([pair]), partial=True, weight_version=label)
        for pair in named(m).items()
    ],
    "disk": from_disk,
    "share": lambda e, m, label, _: e.llm.run(e.client.share_weights(m, label)),
    "in place": write_in_place,
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("how", PATHS)
def test_a_warm_prompt_after_an_update(make_engine: Any, tmp_path: Path, how: str, tied: bool) -> None:
    """D1, D4: a prompt that was cached under W0 is computed anew after an update by any path, exact under W1,
    then W2; what is cached then is of those."""
    models = {f"W{seed}": Tiny.model(seed=seed, tie_word_embeddings=tied) for seed in range(3)}
    prompt = Tiny.prompt(30)
    if how == "in place":
        engine = make_engine(Tiny.model(**TIED if tied else {}), page_size=4, weight_version="W0")
    else:
        engine = owner(make_engine, models["W0"])
    for version in ("W0", "W1", "W2"):
        if version != "W0":
            PATHS[how](engine, models[version], version, tmp_path)
        for cached in (0, 28):
            result = take(engine, ask(engine, prompt))
            assert result["meta_info"]["cached_tokens"] == cached
            assert span_gap(models, prompt, result) < EXACT
            assert labels(result) == [(version, 0, 6)]
    Tiny.all_back(engine)


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("mode", [None, "keep", "retract"])
def test_five_updates_with_a_live_request(
    make_engine: Any, models: Any, pool: Any, mode: str | None, flush: bool
) -> None:
    """D2, C6: five updates, with and without a flush, while a request lives: none is refused or kills it; new
    requests for the same prompt never read older KV, and find what was cached since."""
    engine, prompt = owner(make_engine, models["W0"]), Tiny.prompt(21)
    with StepGate(engine) as gate:
        live = ask(engine, prompt, max_new_tokens=80)
        gate.step(2)
        for turn in range(1, 6):
            label = f"W{turn % 3}"
            gate.wait()
            if mode is None:
                update = begin_update(
                    engine,
                    pool,
                    gate,
                    lambda label=label: push(engine, models[label], label, flush_cache=flush),
                )
                gate.step()
                assert update.result(WAIT)[0] is True
            else:
                pausing = begin(engine, pool, engine.pause, mode)
                gate.step()
                assert pausing.result(WAIT)
                assert push(engine, models[label], label, flush_cache=flush)[0] is True
                engine.resume()
            new = ask(engine, prompt, max_new_tokens=3)
            gate.step(4)
            result = take(engine, new)
            assert labels(result) == [(label, 0, 3)] and span_gap(models, prompt, result) < EXACT
            again = ask(engine, prompt, max_new_tokens=1)
            gate.step(2)
            assert take(engine, again)["meta_info"]["cached_tokens"] == 20
        gate.open()
        result = take(engine, live)
    assert reason(result) == "length" and len(labels(result)) == 6
    if mode != "keep":
        assert span_gap(models, prompt, result) < EXACT
    Tiny.all_back(engine)


def test_spans(make_engine: Any, models: Any, pool: Any) -> None:
    """D3: one span without an update; split exactly where updates come, also two; no split for one label used
    twice, nor for an update before the first token; kept by a request that is aborted in the queue; a sample
    without tokens has one empty span of the version of then."""
    engine, prompt = owner(make_engine, models["W0"], max_running_requests=1), Tiny.prompt(9)
    assert labels(take(engine, ask(engine, prompt))) == [("W0", 0, 6)]
    with StepGate(engine) as gate:
        first = ask(engine, prompt, {"rid": "first"}, max_new_tokens=20)
        empty = ask(engine, prompt[:3], {"rid": "empty"})
        for label, steps in (("W0", 2), ("W1", 1), ("W1", 2), ("W2", 3)):
            gate.step(steps - 1)
            gate.wait()
            pausing = begin(engine, pool, engine.pause, "retract")
            gate.step()
            assert pausing.result(WAIT)
            push(engine, models[label], label)
            engine.resume()
        gate.wait()
        pausing = begin(engine, pool, engine.pause, "retract")
        gate.step()
        assert pausing.result(WAIT)
        push(engine, models["W0"], "later")
        engine.abort("first")
        engine.abort("empty")
        result, nothing = take(engine, first, empty)
        gate.open()
        engine.resume()
    assert labels(result) == [("W0", 0, 3), ("W1", 3, 8), ("W2", 8, 9)]
    assert span_gap(models, prompt, result) < EXACT
    assert labels(nothing) == [("later", 0, 0)] and nothing["meta_info"]["weight_version"] == "later"


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("computed", [8, 16, 22, 24])
def test_kv_of_two_epochs_is_nobody_elses(
    make_engine: Any, models: Any, pool: Any, flush: bool, computed: int
) -> None:
    """D5, E17: a request kept across an update goes on over its frozen KV, exactly; one for the same prompt,
    or for its prompt and output, shares none of it, neither while it lives nor after its end, under the same
    label either."""
    engine, prompt = owner(make_engine, models["W0"], chunked_prefill_size=8), Tiny.prompt(22)
    with StepGate(engine) as gate:
        kept = ask(engine, prompt, max_new_tokens=8)
        steps = {8: 1, 16: 2, 22: 3, 24: 5}[computed]
        gate.step(steps - 1)
        gate.wait()
        pausing = begin(engine, pool, engine.pause, "keep")
        gate.step()
        assert pausing.result(WAIT)
        assert kept._requests[0].computed == computed
        push(engine, models["W1"], "W0", flush_cache=flush)
        same = ask(engine, prompt, max_new_tokens=8)
        gate.open()
        engine.resume()
        frozen, fresh = take(engine, kept, same)
    assert labels(frozen) == [("W0", 0, 8)]
    assert frozen_gap(prompt, frozen, (models["W0"], computed), (models["W1"], 0)) < EXACT
    assert fresh["meta_info"]["cached_tokens"] == 0 and span_gap({"W0": models["W1"]}, prompt, fresh) < EXACT
    longer = [*prompt, *frozen["output_ids"]]
    for cached in (None, 28):
        result = take(engine, ask(engine, longer))
        assert cached is None or result["meta_info"]["cached_tokens"] == cached
        assert span_gap({"W0": models["W1"]}, longer, result) < EXACT
    Tiny.all_back(engine)


def test_no_drift_over_thirty_updates(make_engine: Any) -> None:
    """F13: 30 random updates by random paths, shared ones among them: the distance from the reference stays
    what rounding makes it."""
    rng = random.Random(0)
    engine = owner(make_engine, Tiny.model(seed=0))
    prompt, gaps = Tiny.prompt(12), []
    for turn in range(30):
        model = Tiny.model(seed=100 + turn)
        how = rng.choice(["mapping", "iterator", "atomic", "bucket", "bytes"]) if turn < 15 else "share"
        PATHS[how](engine, model, f"V{turn}", Path())
        gaps.append(span_gap({f"V{turn}": model}, prompt, take(engine, ask(engine, prompt))))
    assert max(gaps) < 3e-5
    assert max(gaps[20:]) < 3 * max(gaps[:10])


@pytest.mark.parametrize("tag", ["weights", "kv_cache", None])
def test_prompts_in_flight_start_over(make_engine: Any, models: Any, pool: Any, tag: str | None) -> None:
    """A half prefilled prompt whose logprobs are asked for, retracted by a release and updated: they are
    W1's, each once; with one token already drawn they stay W0's, like that token."""
    engine, prompts = (
        owner(make_engine, models["W0"], chunked_prefill_size=8),
        [Tiny.prompt(5), Tiny.prompt(30)],
    )
    with StepGate(engine) as gate:
        with Tiny.held(engine):
            streams = [ask(engine, p, {"logprob_start_len": 0}, max_new_tokens=4) for p in prompts]
        gate.step(1)
        gate.wait()
        pausing = begin(engine, pool, engine.pause, "retract")
        gate.step()
        assert pausing.result(WAIT)
        engine.release_memory_occupation(tag)
        engine.resume_memory_occupation(tag)
        push(engine, models["W1"], "W1")
        gate.open()
        engine.resume()
        results = take(engine, *streams)
    for prompt, result, label in zip(prompts, results, ("W0", "W1"), strict=True):
        told = [value for value, _, _ in result["meta_info"]["input_token_logprobs"][1:]]
        expected = Tiny.ref_logprobs(models[label], prompt)
        assert max(abs(a - b) for a, b in zip(told, expected, strict=True)) < EXACT
        assert span_gap(models, prompt, result) < EXACT
    Tiny.all_back(engine)
