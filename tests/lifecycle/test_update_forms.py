"""What an update may be made of: names, ties, dtypes and strides; and weights read back by any of their
names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.lifecycle.guarded import (
    PATHS,
    exact,
    looks,
    rig,
    save_model,
    update,
    weights_of,
)
from tests.lifecycle.rollouts import EXACT
from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.weights import Receipt, checksum

MIXED = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


Q, K, V = (f"model.layers.0.self_attn.{x}_proj" for x in "qkv")


EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_unlabelled_versions_count(make_engine: Any, tmp_path: Path) -> None:
    """Contract 6: without a label the version is the number of commits so far, however they came."""
    model = Tiny.model()
    engine = make_engine(model.config, weight_version="start")
    saved = save_model(model, tmp_path)
    found = [Tiny.state(engine)["weight_version"]]
    for number, path in enumerate(PATHS):
        label = "named" if number == 2 else None
        receipt = update(
            engine, "engine", path, saved if path == "disk" else weights_of(model), weight_version=label
        )
        assert isinstance(receipt, Receipt)
        found.append(receipt.version)
    assert found == ["start", "1", "2", "named", "4", "5", "6"]
    with pytest.raises(RequestError, match="weight_version"):
        engine.update_weights_from_tensor(weights_of(model), weight_version="")


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "base_model.model.", "module._orig_mod."])
@pytest.mark.parametrize("path", ["mapping", "iterator", "bucket", "bytes"])
def test_names(make_engine: Any, path: str, prefix: str) -> None:
    """E3: fused and single names in one set, behind any wrapper's prefix: equal, nothing skipped."""
    model = Tiny.model("qwen2", seed=1)
    engine, weights = make_engine(model.config), weights_of(model)
    for kind in ("weight", "bias"):
        if f"{Q}.{kind}" in weights:
            fused = torch.cat([weights.pop(f"{part}.{kind}") for part in (Q, K, V)])
            weights[f"model.layers.0.self_attn.qkv_proj.{kind}"] = fused
    up = [weights.pop(f"model.layers.1.mlp.{part}_proj.weight") for part in ("gate", "up")]
    weights["model.layers.1.mlp.gate_up_proj.weight"] = torch.cat(up)
    receipt = update(engine, "engine", path, {prefix + name: tensor for name, tensor in weights.items()})
    assert isinstance(receipt, Receipt)
    assert set(receipt.loaded) == set(weights_of(model))
    assert receipt.checksum == checksum(weights_of(model))


@pytest.mark.parametrize("names", [(EMBED,), (HEAD,), (EMBED, HEAD), (HEAD, EMBED)], ids=" ".join)
@pytest.mark.parametrize("path", ["mapping", "iterator", "bucket", "bytes"])
def test_tied_embeddings(make_engine: Any, path: str, names: tuple[str, ...]) -> None:
    """E4: the tied weight by either name or both counts once; logits are the reference's."""
    model = Tiny.model(seed=1, tie_word_embeddings=True)
    engine = make_engine(model.config)
    weights = weights_of(model)
    embedding = weights.pop(EMBED)
    receipt = update(engine, "engine", path, {**weights, **dict.fromkeys(names, embedding)})
    assert isinstance(receipt, Receipt)
    assert set(receipt.loaded) == {*weights, EMBED} and exact(model, engine) < EXACT
    assert receipt.checksum == checksum(weights_of(model)) == checksum(model.state_dict())
    assert receipt.bytes == sum(tensor.nbytes for tensor in weights_of(model).values())


def odd(tensor: Tensor, number: int) -> Tensor:
    """The same values, laid out in memory otherwise."""
    if tensor.dim() == 2 and number % 3 == 0:
        return tensor.T.contiguous().T
    if number % 3 == 1:
        wide = torch.zeros(2 * tensor.shape[0] + 1, *tensor.shape[1:], dtype=tensor.dtype)
        wide[1::2] = tensor
        return wide[1::2]
    return tensor.clone().requires_grad_(True)


@pytest.mark.parametrize("path", ["mapping", "list", "iterator", "bucket", "bytes"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_any_float_with_any_strides(make_engine: Any, path: str, dtype: str) -> None:
    """E5: transposed, strided and grad-requiring tensors of four dtypes in one set are each cast once to the
    engine's: bits equal to torch's own cast."""
    weights = weights_of(Tiny.model("qwen2", seed=1, intermediate_size=77))
    engine = make_engine(Tiny.config("qwen2", intermediate_size=77), dtype=dtype)
    sent = {name: odd(tensor.to(MIXED[i % 4]), i) for i, (name, tensor) in enumerate(weights.items())}
    receipt = update(engine, "engine", path, sent)
    assert isinstance(receipt, Receipt)
    kind = getattr(torch, dtype)
    assert receipt.checksum == checksum({name: tensor.to(kind) for name, tensor in sent.items()})
    assert receipt.checksum == checksum(sent, dtype=kind)
    for name, tensor in engine.named_parameters():
        assert torch.equal(tensor, sent[name].detach().to(kind))


@pytest.mark.parametrize("path", PATHS)
def test_an_engine_of_another_dtype(make_engine: Any, tmp_path: Path, path: str) -> None:
    """E5, E6: a bfloat16 engine from float32 weights and back from bfloat16 ones: the same weights, and the
    same output as the same engine ever gave."""
    wide, narrow = Tiny.model(seed=1), Tiny.model(seed=1).to(torch.bfloat16)
    engine = make_engine(Tiny.config(), dtype="bfloat16")
    found = []
    for number, model in enumerate((wide, narrow, wide)):
        source = save_model(model, tmp_path / str(number)) if path == "disk" else weights_of(model)
        assert isinstance(update(engine, "engine", path, source), Receipt)
        found.append(looks(engine))
    assert found[0] == found[1] == found[2]
    assert found[0].checksum == checksum(weights_of(narrow))
    full = make_engine(Tiny.config())
    source = save_model(narrow, tmp_path / "again") if path == "disk" else weights_of(narrow)
    assert isinstance(update(full, "engine", path, source), Receipt)
    with torch.no_grad():
        for name, tensor in weights_of(narrow).items():
            wide.get_parameter(name).copy_(tensor)
    assert exact(wide, full) < EXACT


def served(engine: Engine, name: str, rows: int = 1000) -> Tensor:
    return torch.tensor(engine.get_weights_by_name(name, rows))


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_weights_by_name(make_engine: Any, monkeypatch: Any, kind: str) -> None:
    """E3, B1: by Hugging Face, fused, tied and prefixed names, un-fused, in every state that has weights: the
    ones of now, also paused, while KV sleeps, and after updates and cycles."""
    models = [Tiny.model("qwen3", seed, tie_word_embeddings=True) for seed in (0, 1)]
    engine = rig(make_engine, monkeypatch, models[0], share=kind == "shared", weights_backup="cpu").engine

    def change(model: PreTrainedModel) -> None:
        if kind == "shared":
            engine.share_weights(model)
        else:
            engine.update_weights_from_tensor(weights_of(model))

    def cycle() -> None:
        engine.release_memory_occupation()
        engine.resume_memory_occupation()

    states: list[tuple[Callable[[], Any], int]] = [
        (lambda: None, 0),
        (lambda: engine.pause("keep"), 0),
        (lambda: change(models[1]), 1),
        (engine.resume, 1),
        (lambda: engine.release_memory_occupation("kv_cache"), 1),
        (lambda: change(models[0]), 0),
        (engine.resume_memory_occupation, 0),
        (cycle, 0),
    ]
    for act, number in states:
        act()
        weights = weights_of(models[number])
        for prefix in ("", "module.", "base_model.model."):
            for name in (f"{K}.weight", "model.norm.weight", EMBED):
                assert torch.equal(served(engine, prefix + name), weights[name])
            assert torch.equal(served(engine, prefix + HEAD), weights[EMBED])
            fused = served(engine, f"{prefix}model.layers.0.self_attn.qkv_proj.weight")
            assert torch.equal(fused, torch.cat([weights[f"{part}.weight"] for part in (Q, K, V)]))
        assert torch.equal(served(engine, f"{V}.weight", 3), weights[f"{V}.weight"][:3])
        assert engine.get_weights_by_name(EMBED, 0) == []
    for bad in ("model.layers.2.mlp.up_proj.weight", "", 3):
        with pytest.raises(RequestError, match="no such parameter"):
            engine.get_weights_by_name(bad)
