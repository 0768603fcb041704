"""A wake, a release or a first map that finds no room changes nothing, says what it wanted, and can be tried
again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from tests.lifecycle.guarded import MiB, exact, looks, rig, version, weights_of
from tests.lifecycle.rollouts import EXACT, ask, settled, span_gap, take
from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.core import model_source
from tokenspeed_rl.errors import EngineStateError, OutOfMemoryError, WeightsInvalidError
from tokenspeed_rl.memory import FakeVMM
from tokenspeed_rl.requests import ResumeMemoryOccupationReqInput

W0, W1 = Tiny.model(), Tiny.model(seed=1)
SMALL = {"max_total_tokens": 512, "max_running_requests": 4}


@pytest.mark.parametrize("backup", ["none", "cpu"])
@pytest.mark.parametrize("room", ["nothing", "a part of the weights", "the weights", "all but a page"])
def test_no_room(make_engine: Any, monkeypatch: Any, backup: str, room: str) -> None:
    """A1: a capacity too small for all of a wake. Wanted and free bytes are named, nothing is mapped, the
    engine sleeps on with its backup; with room again the retry gives the output of before."""
    made = rig(make_engine, monkeypatch, W0, weights_backup=backup, **SMALL)
    engine, vmm = made.engine, made.vmm
    before, places, usage = looks(engine), made.addresses(), vmm.usage()
    weights, kv = usage["weights"].mapped, usage["kv_cache"].mapped
    engine.release_memory_occupation()
    asleep, name = vmm.usage(), version(engine)
    waiting = ask(engine, [1, 2, 3])
    vmm.capacity = {
        "nothing": 0,
        "a part of the weights": weights - 1,
        "the weights": weights,
        "all but a page": weights + kv - 1,
    }[room]
    short, left = (weights, vmm.capacity) if vmm.capacity < weights else (kv, vmm.capacity - weights)
    for _ in range(2):
        with pytest.raises(OutOfMemoryError, match=f"{short:,} bytes wanted, {left:,} free") as error:
            engine.resume_memory_occupation()
        assert (error.value.wanted, error.value.free) == (short, left)
        with pytest.raises(OutOfMemoryError):
            asyncio.run(engine.client.resume_memory_occupation(ResumeMemoryOccupationReqInput()))
        assert vmm.usage() == asleep and version(engine) == name
        assert set(Tiny.state(engine)["residency"].values()) == {"released"}
        settled(engine)
        assert waiting._requests[0].output_len == 0
    vmm.capacity = weights + kv
    engine.resume_memory_occupation()
    if backup == "none":
        engine.update_weights_from_tensor(weights_of(W0), weight_version="W0")
    assert span_gap({"W0": W0}, [1, 2, 3], take(engine, waiting)) < EXACT
    assert vmm.usage() == usage and made.addresses() == places and looks(engine) == before


@pytest.mark.parametrize("first", [None, "weights", "kv_cache"])
def test_the_kth_map_fails(make_engine: Any, monkeypatch: Any, first: str | None) -> None:
    """A2: whichever map of a wake fails, mapped bytes and state are those of before the call, whatever was
    awake already; the retry works."""
    made = rig(make_engine, monkeypatch, W0, weights_backup="cpu", **SMALL)
    engine, vmm = made.engine, made.vmm
    before = looks(engine)
    for at in (1, 2):
        engine.release_memory_occupation()
        if first is not None:
            engine.resume_memory_occupation(first)
        usage, residency, maps = vmm.usage(), Tiny.state(engine)["residency"], vmm.maps
        vmm.fail_at = at
        if first is None or at == 1:
            with pytest.raises(OutOfMemoryError):
                engine.resume_memory_occupation()
            assert vmm.usage() == usage and Tiny.state(engine)["residency"] == residency
            assert vmm.fail_at is None and vmm.maps == maps + at - 1
        vmm.fail_at = None
        engine.resume_memory_occupation()
        assert looks(engine) == before


def test_no_room_at_construction_and_at_the_first_generate(make_engine: Any, monkeypatch: Any) -> None:
    """A1, A2: an engine that can't be built leaves nothing mapped; one whose first request finds no room for
    KV refuses that request, and serves it once there is."""
    vmm = FakeVMM(1000)
    monkeypatch.setattr(model_source, "memory_for", lambda device: vmm)
    with pytest.raises(OutOfMemoryError, match=r"bytes wanted, 1,000 free"):
        make_engine(W0.config)
    assert vmm.ledger.mapped == 0 and all(usage.virtual == 0 for usage in vmm.usage().values())
    made = rig(make_engine, monkeypatch, W0, **SMALL)
    engine, capacity = made.engine, made.vmm.capacity
    made.vmm.capacity = made.vmm.ledger.mapped
    for wait in (False, True):
        with pytest.raises(OutOfMemoryError, match="0 free"):
            engine.generate(input_ids=[1], wait=wait)
    assert made.vmm.usage()["kv_cache"].mapped == engine.get_load()[0].num_reqs == 0
    made.vmm.capacity = capacity
    assert exact(W0, engine) < EXACT


def test_the_memory_that_kv_can_have_is_gone(make_engine: Any, monkeypatch: Any) -> None:
    """A1: sized from what is free, the cache needs a page at least; what would keep it from the reserve is
    named, and the wake is whole or nothing."""
    made = rig(
        make_engine,
        monkeypatch,
        W0,
        max_total_tokens=None,
        max_running_requests=4,
        reserve_bytes=MiB,
        weights_backup="cpu",
    )
    engine, vmm = made.engine, made.vmm
    before = looks(engine)
    engine.release_memory_occupation()
    asleep = vmm.usage()
    vmm.capacity = asleep["weights"].host + MiB
    with pytest.raises(OutOfMemoryError, match=f"reserve_bytes={MiB}"):
        engine.resume_memory_occupation()
    assert vmm.usage() == asleep
    vmm.capacity = 4 * MiB
    engine.resume_memory_occupation()
    assert looks(engine) == before


@pytest.mark.parametrize("tags", [["weights"], ["kv_cache", "weights"]], ids=str)
def test_no_host_memory_for_the_backup(make_engine: Any, monkeypatch: Any, tags: Any) -> None:
    """A5: a backup that the host has no room for. The release is refused: the weights are there, valid, and
    served; what can go still goes by its own name."""
    made = rig(make_engine, monkeypatch, W0, weights_backup="cpu")
    engine, vmm = made.engine, made.vmm
    before, usage = looks(engine), vmm.usage()
    monkeypatch.setattr(vmm, "host_free", lambda: 7)
    with pytest.raises(OutOfMemoryError, match=r"backup of weights.* 7 free"):
        engine.release_memory_occupation(tags)
    assert vmm.usage() == usage and not engine.is_sleeping() and looks(engine) == before
    engine.release_memory_occupation("kv_cache")
    monkeypatch.undo()
    engine.release_memory_occupation("weights")
    assert vmm.ledger.mapped == 0
    engine.resume_memory_occupation()
    assert looks(engine) == before


def test_a_failed_wake_keeps_its_backup_until_another_update(make_engine: Any, monkeypatch: Any) -> None:
    """A1, A5: after a wake that failed behind the weights, the backup is there still; after one of the
    weights alone it is used up, and a later update is what the next backup has."""
    made = rig(make_engine, monkeypatch, W0, weights_backup="cpu", **SMALL)
    engine, vmm = made.engine, made.vmm
    exact(W0, engine)
    for model in (W1, W0):
        engine.release_memory_occupation()
        vmm.fail_at = 2
        with pytest.raises(OutOfMemoryError):
            engine.resume_memory_occupation()
        assert vmm.usage()["weights"].host > 0
        engine.resume_memory_occupation("weights")
        assert vmm.usage()["weights"].host == 0
        engine.update_weights_from_tensor(weights_of(model))
        engine.release_memory_occupation("weights")
        engine.resume_memory_occupation()
        assert exact(model, engine, cached=0) < EXACT


def test_a_shared_module_that_moved_while_it_slept(make_engine: Any, monkeypatch: Any) -> None:
    """A1, E13: a wake finds other storage than it left. It is refused by name, nothing is mapped, and the
    weights are known to be invalid, until the module is shared again, which needs no memory."""
    model = Tiny.model()
    made = rig(make_engine, monkeypatch, model, share=True, **SMALL)
    engine, vmm = made.engine, made.vmm
    exact(model, engine)
    engine.release_memory_occupation()
    parameter = model.get_parameter("model.layers.0.self_attn.v_proj.weight")
    parameter.data = parameter.data.clone()
    for tags in (None, "weights"):
        with pytest.raises(WeightsInvalidError, match=r"v_proj.weight.*share_weights"):
            engine.resume_memory_occupation(tags)
        assert vmm.ledger.mapped == 0
        assert set(Tiny.state(engine)["residency"].values()) == {"released"}
    assert Tiny.state(engine)["validity"].startswith("invalid")
    with pytest.raises(EngineStateError, match="sleeps"):
        engine.generate(input_ids=[1])
    waiting = ask(engine, [1, 2, 3])
    engine.resume_memory_occupation("kv_cache")  # nothing can run yet
    engine.share_weights(model)
    engine.resume_memory_occupation()
    assert span_gap({"1": model}, [1, 2, 3], take(engine, waiting)) < EXACT
    assert exact(model, engine, cached=0) < EXACT
    engine.release_memory_occupation("kv_cache")
    waiting = ask(engine, [1, 2, 3])
    parameter.data = parameter.data.clone()
    with pytest.raises(WeightsInvalidError, match=r"v_proj.weight.*share_weights"):
        engine.resume_memory_occupation("kv_cache")
    assert made.vmm.usage()["kv_cache"].mapped == 0
    engine.share_weights(model)
    engine.resume_memory_occupation("kv_cache")
    assert span_gap({"2": model}, [1, 2, 3], take(engine, waiting)) < EXACT
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    engine.weights_changed()
    assert exact(model, engine, cached=0) < EXACT


def test_two_engines_on_one_device(make_engine: Any, monkeypatch: Any) -> None:
    """G9, A1: what one gives back the other can have; each sleeps and wakes by itself."""
    vmm = FakeVMM(1 << 40)
    engines: list[Engine] = []
    with monkeypatch.context() as patch:
        patch.setattr(model_source, "memory_for", lambda device: vmm)
        for model in (W0, W1):
            engines.append(make_engine(model.config, weights_backup="cpu", **SMALL))
            engines[-1].update_weights_from_tensor(weights_of(model))
    before = [looks(engine) for engine in engines]
    both = vmm.ledger.mapped
    engines[0].release_memory_occupation()
    vmm.capacity = both - 1
    with pytest.raises(OutOfMemoryError):
        engines[0].resume_memory_occupation()
    assert looks(engines[1]) == before[1]
    engines[1].release_memory_occupation("kv_cache")
    engines[0].resume_memory_occupation()
    assert looks(engines[0]) == before[0]
    vmm.capacity = both
    engines[1].resume_memory_occupation()
    assert [looks(engine) for engine in engines] == before
