"""Shared weights in every state: they are the trainer's, so nothing of them is released, saved or written,
and the engine never computes with any that moved."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.lifecycle.guarded import (
    HOW,
    PATHS,
    PROMPT,
    exact,
    looks,
    rig,
    save_model,
    update,
    version,
    weights_of,
)
from tests.lifecycle.rollouts import EXACT, WAIT, ask, labels, span_gap, take
from tests.step_gate import StepGate
from tests.tiny import Tiny
from tokenspeed_rl.errors import EngineStateError, RequestError, WeightsInvalidError
from tokenspeed_rl.memory import TAGS
from tokenspeed_rl.weights import checksum

MOVED = "model.layers.1.self_attn.k_proj.weight"
MODELS = [Tiny.model(seed=seed) for seed in range(3)]
STATES = ["awake", "weights", "kv_cache", "all", "keep", "retract"]


@torch.no_grad()
def train(model: PreTrainedModel, seed: int) -> None:
    """Write the parameters in place, as an optimiser does."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def move(model: PreTrainedModel) -> None:
    """Another storage for one parameter, with the same values."""
    parameter = model.get_parameter(MOVED)
    parameter.data = parameter.data.clone()


def enter(engine: Any, state: str) -> None:
    """Into one of `STATES`."""
    if state in ("keep", "retract"):
        engine.pause(state)
    elif state != "awake":
        engine.release_memory_occupation(None if state == "all" else state)


def leave(engine: Any) -> None:
    """Awake and running."""
    engine.resume_memory_occupation()
    engine.resume()


@pytest.mark.parametrize("state", STATES)
def test_the_trainer_steps(make_engine: Any, monkeypatch: Any, state: str) -> None:
    """E13, D1: whatever the engine's state, the trainer may step and tell it, which copies nothing; what is
    computed afterwards is computed with the new weights and nothing that was cached."""
    model = Tiny.model()
    made = rig(make_engine, monkeypatch, model, share=True, weights_backup="cpu")
    engine, addresses = made.engine, {name: p.data_ptr() for name, p in model.named_parameters()}
    assert exact(model, engine) < EXACT
    for number in range(2):
        enter(engine, state)
        assert made.vmm.saves == 0 and made.vmm.usage()["weights"] == (0, 0, 0)
        assert version(engine)[2] == "valid"
        waiting = ask(engine, PROMPT) if state != "awake" else None
        train(model, number)
        receipt = engine.weights_changed(f"step {number}")
        assert (receipt.kind, receipt.bytes, receipt.version) == ("shared", 0, f"step {number}")
        leave(engine)
        assert receipt.checksum == checksum(weights_of(model))
        if waiting is not None:
            result = take(engine, waiting)
            assert labels(result) == [(f"step {number}", 0, 6)]
            assert span_gap({f"step {number}": model}, PROMPT, result) < EXACT
            engine.flush_cache()
        assert exact(model, engine, cached=0) < EXACT
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == addresses
    Tiny.all_back(engine)


@pytest.mark.parametrize("state", STATES)
def test_another_module(make_engine: Any, monkeypatch: Any, state: str) -> None:
    """E13, B1: `share_weights` in every state, first on an engine with weights of its own, whose memory and
    backup go back, then with another module."""
    made = rig(make_engine, monkeypatch, MODELS[0], weights_backup="cpu")
    engine = made.engine
    exact(MODELS[0], engine)
    for model in MODELS[1:]:
        enter(engine, state)
        receipt = engine.share_weights(model)
        assert (receipt.kind, receipt.bytes) == ("shared", 0) and len(receipt.loaded) == len(
            weights_of(model)
        )
        assert made.vmm.usage()["weights"] == (0, 0, 0)
        assert engine.memory_report()["weights"]["owner"] == "trainer"
        leave(engine)
        assert exact(model, engine, cached=0) < EXACT
        assert engine.weights_checksum() == checksum(weights_of(model))
    Tiny.all_back(engine)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("state", ["awake", "all", "kv_cache", "keep"])
def test_there_is_nothing_to_copy_to(
    make_engine: Any, monkeypatch: Any, tmp_path: Path, state: str, how: str
) -> None:
    """B1, E12: an update by any path is refused, typed, with what to do instead; nothing of it is read, and
    module and version are as they were."""
    model = Tiny.model()
    engine = rig(make_engine, monkeypatch, model, share=True).engine
    before, saved = looks(engine), save_model(Tiny.model(seed=1), tmp_path)
    enter(engine, state)
    name = version(engine)
    for path in PATHS:
        source: Any = saved if path == "disk" else weights_of(Tiny.model(seed=1))
        error = update(engine, how, path, source)
        assert type(error) is EngineStateError
        match = "sleeps" if state == "all" else r"shared with this engine.*weights_changed\(\)"
        with pytest.raises(EngineStateError, match=match):
            raise error
        assert version(engine) == name
    leave(engine)
    assert looks(engine) == before


@pytest.mark.parametrize("tags", [["weights"], ["weights", "kv_cache"], None], ids=str)
def test_releasing_them_moves_nothing(make_engine: Any, monkeypatch: Any, tags: Any) -> None:
    """Contract 6, A5: the tag sleeps like any other, but module, validity, version and values stay; generate
    still needs all tags, and reading asks for the wake."""
    model = Tiny.model()
    made = rig(make_engine, monkeypatch, model, share=True, weights_backup="cpu")
    engine, before = made.engine, looks(made.engine)
    name, copies = version(engine), {n: t.clone() for n, t in weights_of(model).items()}
    for _ in range(2):
        engine.release_memory_occupation(tags)
        assert engine.is_sleeping() and version(engine) == name and made.vmm.saves == 0
        assert all(torch.equal(tensor, copies[n]) for n, tensor in weights_of(model).items())
        reads = (engine.weights_checksum, engine.named_parameters, lambda: engine.get_weights_by_name(MOVED))
        for call in (*reads, lambda: engine.generate(input_ids=[1])):
            with pytest.raises(EngineStateError, match="sleeps: weights"):
                call()
        engine.resume_memory_occupation()
        assert looks(engine) == before and version(engine) == name


@pytest.mark.parametrize("state", STATES)
def test_moved_storage(make_engine: Any, monkeypatch: Any, state: str) -> None:
    """E13, B1: storage that moved in any state is noticed by whoever comes first: the wake, the next request
    or `weights_changed`. It is named, no forward touches it, what slept sleeps on, and `share_weights` mends
    it; a request that waited all the while is computed exactly then."""
    model = Tiny.model()
    made = rig(make_engine, monkeypatch, model, share=True)
    engine = made.engine
    exact(model, engine)
    enter(engine, state)
    waiting = ask(engine, PROMPT) if state != "awake" else None
    asleep = Tiny.state(engine)["residency"]
    move(model)
    if state in ("weights", "kv_cache", "all"):
        with pytest.raises(WeightsInvalidError, match=MOVED):
            engine.resume_memory_occupation()
        assert Tiny.state(engine)["residency"] == asleep
    elif state == "awake":
        with pytest.raises(WeightsInvalidError, match=MOVED):
            engine.generate(input_ids=[1])
    with pytest.raises(WeightsInvalidError, match=MOVED):
        engine.weights_changed()
    assert MOVED in version(engine)[2]
    engine.share_weights(model)
    leave(engine)
    if waiting is not None:
        assert span_gap({"1": model}, PROMPT, take(engine, waiting)) < EXACT
    engine.flush_cache()
    assert exact(model, engine, cached=0) < EXACT
    Tiny.all_back(engine)


def test_the_client_in_its_sleep(make_engine: Any, monkeypatch: Any) -> None:
    """Contract 5: `AsyncLLM.generate_request` waits while weights sleep, also when the trainer moves its
    module meanwhile; the wake finds out, and sharing again serves the request."""
    model = Tiny.model()
    engine = rig(make_engine, monkeypatch, model, share=True).engine
    engine.release_memory_occupation()
    move(model)
    waiting = ask(engine, PROMPT)
    with pytest.raises(EngineStateError, match="sleeps"):
        engine.generate(input_ids=PROMPT)
    with pytest.raises(WeightsInvalidError, match=MOVED):
        engine.resume_memory_occupation()
    asyncio.run(engine.client.share_weights(model, "again"))
    engine.resume_memory_occupation()
    assert labels(take(engine, waiting)) == [("again", 0, 6)]


@pytest.mark.parametrize("mode", [None, "keep", "retract"])
def test_a_step_in_the_middle_of_a_request(make_engine: Any, monkeypatch: Any, mode: str | None) -> None:
    """C6, D3: a request in flight when the shared weights change: it re-prefills and splits its version span
    there, under `keep` it goes on with its KV; tokens drawn before stay."""
    model = Tiny.model()
    engine = rig(make_engine, monkeypatch, model, share=True, weight_version="W0").engine
    old, retractions = Tiny.model(), Tiny.state(engine)["num_retractions"]
    with StepGate(engine) as gate:
        live = ask(engine, PROMPT, max_new_tokens=8)
        gate.step(4)
        gate.wait()

        def change() -> None:
            train(model, 0)
            engine.weights_changed("W1")

        if mode is None:
            future = Tiny.after_step(engine, 1, change)
            gate.open()
            future.result(WAIT)
        else:
            gate.open()
            engine.pause(mode)
            change()
            engine.resume()
        result = take(engine, live)
    spans = labels(result)
    assert [name for name, _, _ in spans] == ["W0", "W1"] and spans[-1][2] == 8
    if mode == "keep":
        assert Tiny.state(engine)["num_retractions"] == retractions
    else:
        assert span_gap({"W0": old, "W1": model}, PROMPT, result) < EXACT
    assert exact(model, engine, cached=0 if mode == "keep" else 20) < EXACT


def test_labels(make_engine: Any) -> None:
    """Contract 6: sharing and steps are counted like updates, a label is text, and the first set keeps that
    of the construction."""
    model = Tiny.model()
    engine = make_engine(model, weight_version="start")
    assert version(engine)[1] == "start"
    assert engine.weights_changed().version == "1"
    assert engine.share_weights(Tiny.model(seed=1)).version == "2"
    assert engine.weights_changed("mine").version == "mine"
    assert engine.weights_changed().version == "4"
    for bad in ("", 3):
        with pytest.raises(RequestError, match="version must be a non-empty string"):
            engine.weights_changed(bad)
    assert version(engine)[1] == "4"


def test_only_what_is_shared_changes(make_engine: Any) -> None:
    """B1: `weights_changed` on an engine with weights of its own is refused, in every state."""
    engine = make_engine(Tiny.config(), weights_backup="cpu")
    before = looks(engine)
    for state in STATES:
        enter(engine, state)
        with pytest.raises(EngineStateError, match="share_weights"):
            engine.weights_changed()
        leave(engine)
    assert looks(engine) == before and set(Tiny.state(engine)["residency"]) == set(TAGS)
