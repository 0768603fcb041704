"""Release and wake: memory really goes, addresses stay, and what comes back is what the engine had last."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.lifecycle.guarded import Rig, exact, looks, rig, version, weights_of
from tests.lifecycle.rollouts import EXACT, Forwards, ask, settled, span_gap, take
from tests.tiny import Tiny
from tokenspeed_rl.errors import EngineStateError, RequestError, WeightsInvalidError
from tokenspeed_rl.memory import TAGS

W0, W1 = Tiny.model(), Tiny.model(seed=1)


SUBSETS = [tags for count in (1, 2, 3) for tags in itertools.combinations(TAGS, count)]


GREEDY = {"temperature": 0, "max_new_tokens": 6}


def residency(made: Rig) -> set[str]:
    """The tags that are released, as the engine says."""
    state = Tiny.state(made.engine)["residency"]
    released = {tag for tag in TAGS if state[tag] == "released"}
    assert made.engine.is_sleeping() == bool(released)
    return released


@pytest.mark.parametrize("kind", ["own", "backup", "shared"])
@pytest.mark.parametrize("tags", SUBSETS, ids=" ".join)
def test_a_cycle(make_engine: Any, monkeypatch: Any, kind: str, tags: tuple[str, ...]) -> None:
    """A5, A7, A10, B1, E12: any tags of own, backed up or shared weights. Their memory is gone on return,
    they come back at their addresses, no backup is left in host memory, and the output is bit for bit the
    same; without a backup of own weights only once they have been written again."""
    options = {"share": kind == "shared", "weights_backup": "cpu" if kind == "backup" else "none"}
    made = rig(make_engine, monkeypatch, W0, **options)
    engine, vmm = made.engine, made.vmm
    before, places, usage = looks(engine), made.addresses(), vmm.usage()
    engine.release_memory_occupation(tags)
    lost = kind == "own" and "weights" in tags
    asleep = vmm.usage()
    for tag in TAGS:
        assert asleep[tag].mapped == (0 if tag in tags else usage[tag].mapped)
        assert asleep[tag].virtual == usage[tag].virtual
        saved = kind == "backup" and tag == "weights" and tag in tags
        assert asleep[tag].host == (usage[tag].mapped if saved else 0)
    assert residency(made) == set(tags)
    with pytest.raises(EngineStateError, match=f"sleeps.*{tags[0]}.*resume_memory_occupation"):
        engine.generate(input_ids=[1])
    if "weights" in tags:
        for read in (engine.weights_checksum, engine.named_parameters):
            with pytest.raises(EngineStateError, match="sleeps: weights"):
                read()
    elif kind != "shared":
        assert engine.weights_checksum() == before.checksum
    engine.resume_memory_occupation()
    assert vmm.usage() == usage and residency(made) == set()
    if lost:
        with pytest.raises(WeightsInvalidError, match="released without a backup"):
            engine.generate(input_ids=[1])
        assert engine.update_weights_from_tensor(weights_of(W0))[0]
    assert made.addresses() == places and looks(engine) == before
    Tiny.all_back(engine)


@pytest.mark.parametrize("backup", ["none", "cpu"])
def test_one_tag_after_another(make_engine: Any, monkeypatch: Any, backup: str) -> None:
    """B2, B3: woken one by one, nothing runs before the last is there, by a call or by the idle loop; then a
    request that waited all along is computed as ever."""
    made = rig(make_engine, monkeypatch, W0, weights_backup=backup)
    engine, before = made.engine, looks(made.engine)
    engine.release_memory_occupation()
    waiting, forwards = ask(engine, [1, 2, 3], **GREEDY), Forwards(engine)
    for tag in ("weights", "kv_cache", "cuda_graph"):
        settled(engine)
        assert forwards.count == 0
        with pytest.raises(EngineStateError):
            engine.generate(input_ids=[1])
        engine.resume_memory_occupation(tag)
        if tag == "weights" and backup == "none":
            engine.update_weights_from_tensor(weights_of(W0))
    assert span_gap({label: W0 for label in ("W0", "2")}, [1, 2, 3], take(engine, waiting)) < EXACT
    assert looks(engine) == before


def test_wrong_and_repeated_tags(make_engine: Any, monkeypatch: Any) -> None:
    """B1: what is released is not released again by name, nor what is resident woken; unknown tags and none
    are refused; None means what is left, also nothing. Nothing changes at a refusal."""
    made = rig(make_engine, monkeypatch, W0, weights_backup="cpu")
    engine = made.engine
    engine.resume_memory_occupation()
    with pytest.raises(EngineStateError, match="already resident: weights"):
        engine.resume_memory_occupation("weights")
    engine.release_memory_occupation("kv_cache")
    with pytest.raises(EngineStateError, match="already released: kv_cache"):
        engine.release_memory_occupation(["weights", "kv_cache"])
    for bad in ("kv", [], ["weights", 3], 7):
        for call in (engine.release_memory_occupation, engine.resume_memory_occupation):
            with pytest.raises(RequestError, match="each tag must be one of weights, kv_cache, cuda_graph"):
                call(bad)
    assert residency(made) == {"kv_cache"}
    engine.release_memory_occupation()
    engine.release_memory_occupation()
    assert residency(made) == set(TAGS) and made.vmm.ledger.mapped == 0
    engine.resume_memory_occupation()
    assert residency(made) == set() and exact(W0, engine) < EXACT


@pytest.mark.parametrize("tags", [None, "weights"])
def test_an_update_is_what_comes_back(make_engine: Any, monkeypatch: Any, tags: Any) -> None:
    """Contract 5: a backup is of the weights at the release, so an update before it is what the wake serves,
    each time; version and label with it."""
    engine = rig(make_engine, monkeypatch, W0, weights_backup="cpu").engine
    old = looks(engine)
    for number, model in enumerate((W1, W0)):
        engine.update_weights_from_tensor(weights_of(model), weight_version=f"update {number}")
        held, name = looks(engine), version(engine)
        assert (held == old) == (model is W0)
        for _ in range(2):
            engine.release_memory_occupation(tags)
            engine.resume_memory_occupation(tags)
            assert looks(engine) == held and version(engine) == name
            assert exact(model, engine) < EXACT


def test_invalid_weights_have_no_backup(make_engine: Any, monkeypatch: Any) -> None:
    """A5, B6: weights that are half written are not saved, and are as invalid after the wake as before."""
    made = rig(make_engine, monkeypatch, W0, weights_backup="cpu")
    engine, name = made.engine, "model.norm.weight"
    piece = {name: weights_of(W1)[name]}
    engine.update_weights_from_tensor(piece, partial=True, weight_version="half")
    engine.release_memory_occupation()
    assert made.vmm.usage()["weights"].host == made.vmm.saves == 0
    engine.resume_memory_occupation()
    rest = {other: tensor for other, tensor in weights_of(W1).items() if other != name}
    engine.update_weights_from_tensor(rest, partial=True, weight_version="half")
    with pytest.raises(WeightsInvalidError):  # the first half is gone
        engine.generate(input_ids=[1])
    engine.update_weights_from_tensor(weights_of(W1))
    assert exact(W1, engine) < EXACT


def test_weights_then_update_then_kv(make_engine: Any, monkeypatch: Any) -> None:
    """A3, B4, A5: woken weights are written while the KV cache sleeps: mapped are the weights alone, one
    incoming tensor is alive at a time, and flushing the cache reads no KV."""
    made = rig(make_engine, monkeypatch, W0)
    engine, vmm = made.engine, made.vmm
    exact(W0, engine)
    usage = vmm.usage()
    engine.release_memory_occupation()
    vmm.ledger.peak = 0
    engine.resume_memory_occupation(["weights"])
    arrived: list[weakref.ref[Tensor]] = []

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights_of(W1).items():
            assert all(ref() is None for ref in arrived)
            bucket = tensor.clone()
            arrived.append(weakref.ref(bucket))
            yield name, bucket
            del bucket

    engine.update_weights_from_tensor(stream(), flush_cache=True, weight_version="W1")
    assert vmm.peak == vmm.ledger.mapped == usage["weights"].mapped
    assert vmm.usage()["weights"].host == vmm.usage()["kv_cache"].mapped == 0
    engine.resume_memory_occupation(["kv_cache"])
    engine.resume_memory_occupation(None)
    assert vmm.peak == sum(use.mapped for use in usage.values())
    assert exact(W1, engine, cached=0) < EXACT


ROPES: dict[str, dict[str, Any]] = {
    "plain": {"rope_theta": 10000.0, "rope_type": "default"},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("rope", ROPES)
def test_buffers_survive(make_engine: Any, monkeypatch: Any, rope: str) -> None:
    """A10: weights discarded and written whole again: the rotary angles, which no update carries, are those
    of the model still."""
    models = [Tiny.model(seed=seed, rope_parameters=ROPES[rope]) for seed in (0, 1)]
    engine = rig(make_engine, monkeypatch, models[0]).engine
    for model in (models[1], models[0]):
        engine.release_memory_occupation()
        engine.resume_memory_occupation()
        engine.update_weights_from_tensor(weights_of(model))
        assert exact(model, engine, Tiny.prompt(100)) < EXACT


def test_rounded_frequencies_survive(make_engine: Any, monkeypatch: Any) -> None:
    """A10: a module cast whole rotates by rounded frequencies, and so does the engine, after a cycle too."""
    engine = rig(make_engine, monkeypatch, Tiny.model().to(torch.bfloat16), share=True).engine
    precise = rig(make_engine, monkeypatch, Tiny.model(), dtype="bfloat16").engine
    long = Tiny.prompt(200)
    rounded, own = looks(engine, long), looks(precise, long)
    assert rounded.logprobs != own.logprobs and rounded.checksum == own.checksum
    for each, expected in ((engine, rounded), (precise, own)):
        each.release_memory_occupation()
        each.resume_memory_occupation()
        if each is precise:
            each.update_weights_from_tensor(weights_of(Tiny.model()))
        assert looks(each, long) == expected


@pytest.mark.parametrize("backup", ["none", "cpu"])
def test_pointers_stay_valid(make_engine: Any, monkeypatch: Any, backup: str) -> None:
    """A11: what holds raw pointers, as a captured graph does, and views taken long before see after a cycle
    whatever the weights are then."""
    engine = rig(make_engine, monkeypatch, W0, weights_backup=backup).engine
    views = dict(engine.named_parameters())
    name = "model.layers.1.mlp.down_proj.weight"
    shape, address = views[name].shape, views[name].data_ptr()
    x = torch.randn(3, shape[1], generator=torch.Generator().manual_seed(0))

    def replay() -> Tensor:
        raw = (ctypes.c_float * shape.numel()).from_address(address)
        return x @ torch.frombuffer(raw, dtype=torch.float32).view(shape).T

    for model in (W0, W1, W0):
        engine.update_weights_from_tensor(weights_of(model))
        for _ in range(2):
            assert torch.equal(replay(), x @ weights_of(model)[name].T)
            assert all(torch.equal(views[each], tensor) for each, tensor in weights_of(model).items())
            engine.release_memory_occupation()
            engine.resume_memory_occupation()
            if backup == "none":
                engine.update_weights_from_tensor(weights_of(model))


def test_resident_restores(make_engine: Any, monkeypatch: Any) -> None:
    """B6: `resident` wakes what sleeps and puts it back to sleep, after an exception too; what was there
    stays."""
    made = rig(make_engine, monkeypatch, W0, weights_backup="cpu")
    engine, before = made.engine, looks(made.engine)
    with engine.resident():
        assert residency(made) == set()
    engine.release_memory_occupation(["weights", "kv_cache"])
    with engine.resident("weights"):
        assert residency(made) == {"kv_cache"}
        assert engine.weights_checksum() == before.checksum
    assert residency(made) == {"weights", "kv_cache"}
    with pytest.raises(ZeroDivisionError), engine.resident():
        assert looks(engine) == before
        raise ZeroDivisionError
    assert residency(made) == {"weights", "kv_cache"}
    engine.resume_memory_occupation()
    assert looks(engine) == before


def test_a_checkpoint_on_disk(make_engine: Any, monkeypatch: Any, tmp_path: Any) -> None:
    """A10, A11: an engine made from files, in bfloat16, sleeps and wakes as one made from a config."""
    W0.to(torch.float32).save_pretrained(tmp_path)
    made = rig(make_engine, monkeypatch, AutoModelForCausalLM.from_pretrained(tmp_path), dtype="bfloat16")
    engine = make_engine(str(tmp_path), dtype="bfloat16", weights_backup="cpu")
    before = looks(engine)
    assert looks(made.engine) == before
    engine.release_memory_occupation()
    engine.resume_memory_occupation()
    assert looks(engine) == before
