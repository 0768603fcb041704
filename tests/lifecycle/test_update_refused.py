"""Weight updates that are refused: before anything is written, by name, and nothing has changed."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lifecycle.guarded import (
    HOW,
    PATHS,
    WHOLE,
    exact,
    looks,
    parcel,
    rig,
    save_model,
    update,
    version,
    weights_of,
)
from tests.lifecycle.kept import HEAD, W0, W1, Kept
from tests.lifecycle.rollouts import EXACT
from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.errors import (
    ConfigError,
    EngineStateError,
    RequestError,
    TokenSpeedError,
    WeightsInvalidError,
    WeightUpdateError,
)
from tokenspeed_rl.requests import UpdateWeightsFromTensorReqInput
from tokenspeed_rl.weights import Receipt

NAMES = list(weights_of(W0))


Named = list[tuple[str, Tensor]]


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    with Engine(W0.config, page_size=4, max_total_tokens=4096) as engine:
        yield Kept(engine)


def without_last(weights: Named) -> Named:
    return weights[:-1]


def unknown(weights: Named) -> Named:
    return [*weights, ("model.layers.9.mlp.up_proj.weight", torch.zeros(2, 2))]


def misshaped(weights: Named) -> Named:
    return [*weights[:-1], (weights[-1][0], torch.zeros(3, 3))]


def integers(weights: Named) -> Named:
    return [*weights[:-1], (weights[-1][0], weights[-1][1].to(torch.int32))]


def twice(weights: Named) -> Named:
    return [*weights, weights[0]]


def another_model(weights: Named) -> Named:
    return list(weights_of(Tiny.model(hidden_size=32)).items())


WRONG: dict[str, Callable[[Named], Named]] = {
    r"1 missing.*lm_head\.weight": without_last,
    r"1 unknown.*layers\.9": unknown,
    r"1 mis-shaped.*lm_head\.weight \[3, 3\] instead of \[256, 64\]": misshaped,
    r"1 unfit.*int32": integers,
    r"1 given twice.*embed_tokens": twice,
    r"mis-shaped.*, \.\.\.": another_model,
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("match", "path"),
    [
        (match, path)
        for match, wrong in WRONG.items()
        for path in ("mapping", "list", "bucket", "bytes")
        if (path == "list" or wrong is not twice) and (path != "bucket" or wrong is not integers)
    ],  # the others can't hold such a set
)
def test_a_wrong_set(kept: Kept, match: str, path: str, how: str) -> None:
    """E2: missing, unknown, mis-shaped in the last tensor, of another size: refused by name before any write,
    through both interfaces; ids are bit for bit those of before."""
    wrong = WRONG[match]
    error = update(kept.engine, how, path, wrong(list(weights_of(W1).items())))
    assert isinstance(error, WeightUpdateError)
    with pytest.raises(WeightUpdateError, match=match):
        raise error
    assert "nothing was written" in str(error)
    kept.check()


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("match", list(WRONG)[:5])
def test_a_wrong_stream(kept: Kept, match: str, how: str, atomic: bool) -> None:
    """E2, E14: what only shows when the last tensor has come: invalid, or with `atomic` as before, bit for
    bit; the message names the offender and what holds now."""
    error = update(
        kept.engine, how, "iterator", iter(WRONG[match](list(weights_of(W1).items()))), atomic=atomic
    )
    assert isinstance(error, WeightUpdateError)
    with pytest.raises(WeightUpdateError, match=match):
        raise error
    if atomic:
        assert "put back" in str(error)
        kept.check()
    else:
        assert "the weights are invalid until a complete update" in str(error)
        kept.mend()


def missing_path(folder: Path) -> Path:
    return folder / "nowhere"


def empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def truncated(folder: Path) -> Path:
    path = save_model(W1, folder / "short")
    file = next(path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-5])
    return path


def missing_shard(folder: Path) -> Path:
    path = save_model(W1, folder / "shards", max_shard_size="50KB")
    sorted(path.glob("*.safetensors"))[1].unlink()
    return path


def pickle_only(folder: Path) -> Path:
    path = save_model(W1, folder / "pickle")
    next(path.glob("*.safetensors")).unlink()
    torch.save(W1.state_dict(), path / "pytorch_model.bin")
    return path


def outside(folder: Path) -> Path:
    path = save_model(W1, folder / "outside", max_shard_size="50KB")
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = sorted(content["weight_map"].values())[0]
    shutil.move(path / name, folder / name)
    text = index.read_text().replace(name, f"../{name}")
    index.write_text(text)
    return path


def other_size(folder: Path) -> Path:
    return save_model(Tiny.model(hidden_size=32), folder / "small")


def other_rope(folder: Path) -> Path:
    return save_model(
        Tiny.model(rope_parameters={"rope_type": "default", "rope_theta": 777.0}), folder / "rope"
    )


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "damage", [missing_path, empty, truncated, missing_shard, pickle_only, outside, other_size, other_rope]
)
def test_a_wrong_checkpoint(kept: Kept, tmp_path: Path, damage: Callable[[Path], Path], how: str) -> None:
    """E7: a path that is missing, empty, cut short, lacks a shard, holds pickles alone, leaves its folder or
    is another model's: refused; path, name and weights stay, bit for bit."""
    error = update(kept.engine, how, "disk", damage(tmp_path))
    assert isinstance(error, ConfigError | WeightUpdateError)
    kept.check()
    assert update(kept.engine, how, "disk", tmp_path, load_format="pickle").__class__ is RequestError
    kept.check()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("backup", ["none", "cpu"])
def test_asleep(make_engine: Any, monkeypatch: Any, tmp_path: Path, backup: str, how: str) -> None:
    """E12: while the weights are released every path is refused, typed, and nothing is written: what wakes is
    what slept. While only the pages sleep an update is fine."""
    made = rig(make_engine, monkeypatch, W0, weights_backup=backup)
    engine, before = made.engine, looks(made.engine)
    saved = save_model(W1, tmp_path)
    engine.release_memory_occupation()
    usage, state = made.vmm.usage(), version(engine)
    for path in PATHS:
        drawn: list[str] = []
        source: Any = saved if path == "disk" else weights_of(W1)
        if path == "iterator":
            source = (drawn.append(name) or (name, tensor) for name, tensor in weights_of(W1).items())
        error = update(engine, how, path, source)
        assert type(error) is EngineStateError and "sleeps: weights released" in str(error)
        assert drawn == [] and made.vmm.usage() == usage and version(engine) == state
    engine.resume_memory_occupation()
    if backup == "cpu":
        assert looks(engine) == before
    engine.release_memory_occupation("kv_cache")
    for path in PATHS:
        assert isinstance(update(engine, how, path, saved if path == "disk" else weights_of(W1)), Receipt)
    engine.resume_memory_occupation()
    assert exact(W1, engine, cached=0) < EXACT


def test_the_order_of_reasons(make_engine: Any) -> None:
    """Contract 5: asleep, then invalid, then paused: each is named once the one before it is gone."""
    engine = make_engine(W0.config, weights_backup="none")
    engine.pause("keep")
    engine.release_memory_occupation()
    ask_now: Callable[[], Any] = lambda: engine.generate(input_ids=[1])  # noqa: E731
    with pytest.raises(EngineStateError, match="sleeps"):
        ask_now()
    engine.resume_memory_occupation()
    with pytest.raises(WeightsInvalidError, match="without a backup"):
        ask_now()
    engine.update_weights_from_tensor(weights_of(W0))
    with pytest.raises(EngineStateError, match="paused"):
        ask_now()
    engine.resume()
    assert exact(W0, engine) < EXACT


@pytest.mark.parametrize("path", WHOLE[:-1])
def test_an_error_holds_no_tensor(kept: Kept, path: str) -> None:
    """E10: when the caller has dealt with a refusal, its tensors are gone at once, without the garbage
    collector; one that is returned, not raised, never held any."""
    kept_errors: list[TokenSpeedError | Receipt] = []
    for how in ("async", "engine"):
        weights = {name: tensor.clone() for name, tensor in weights_of(W1).items()}
        weights[HEAD] = torch.zeros(3)
        refs = [weakref.ref(tensor) for tensor in weights.values()]
        gc.disable()
        try:
            error = update(kept.engine, how, path, weights)
            assert isinstance(error, WeightUpdateError)
            if how == "async":
                kept_errors.append(error)
            del error
            weights.clear()
            assert all(ref() is None for ref in refs)
        finally:
            gc.enable()
    kept.check()


@pytest.mark.parametrize("how", HOW)
def test_fields_that_are_wrong(kept: Kept, how: str) -> None:
    """Contract 2: what is malformed is refused as such, with the field's name."""
    engine = kept.engine
    good = weights_of(W1)
    wrong: dict[str, dict[str, Any]] = {
        "exactly one of": {},
        "named_tensors must be": {"named_tensors": 7},
        "partial": {**parcel("mapping", good), "partial": "yes"},
        "atomic": {**parcel("mapping", good), "atomic": 1},
        "flush_cache": {**parcel("mapping", good), "flush_cache": None},
        "load_format": {**parcel("mapping", good), "load_format": "flattened_bucket"},
        "serialized_named_tensors must": {"serialized_named_tensors": [b"", b""]},
        "weight_version": {**parcel("mapping", good), "weight_version": 3},
    }
    for match, fields in wrong.items():
        with pytest.raises(RequestError, match=match):
            if how == "engine":
                engine.update_weights_from_tensor(**fields)
            else:
                reply = asyncio.run(
                    engine.client.update_weights_from_tensor(UpdateWeightsFromTensorReqInput(**fields))
                )
                assert not reply[0]
                raise reply.report
    with pytest.raises(WeightUpdateError, match="no intact safetensors file"):
        engine.update_weights_from_tensor(serialized_named_tensors=[b"pickle?"])
    with pytest.raises(RequestError, match="Did you mean 'weight_version'"):
        engine.update_weights_from_tensor(good, weights_version="x")
    kept.check()
