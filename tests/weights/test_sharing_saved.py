"""Every way of saving, loading or copying a shared module treats its parameters as independent tensors."""

from __future__ import annotations

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tokenspeed_rl.errors import WeightsInvalidError

FAMILIES = pytest.mark.parametrize(
    ("family", "tied"), [("Llama", False), ("Llama", True), ("Qwen2", False), ("Qwen3", True)]
)


def spoil(model) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float("nan"))


@pytest.fixture
def shared_model(tiny, request):
    family, tied = request.param if hasattr(request, "param") else ("Qwen3", False)
    model = tiny.model(family, tie_word_embeddings=tied)
    store, shared = tiny.share(model)
    return model, store, shared


@FAMILIES
@pytest.mark.parametrize("safe", [True, False])
def test_accelerate_saves_and_loads_all_of_it(tiny, tmp_path, family, tied, safe):
    """E13: accelerate's save_state writes every tensor (not 17 of 27), load_state restores bits."""
    model = tiny.model(family, tie_word_embeddings=tied)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    store, shared = tiny.share(model)
    tiny.train_step(model, optimizer)
    shared.weights_changed()
    before = tiny.snapshot(model)
    accelerator.save_state(tmp_path, safe_serialization=safe)
    if safe:
        with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
            names = set(file.keys())
        assert names >= {name for name, _ in model.named_parameters()}
    tiny.train_step(model, optimizer)
    after = tiny.snapshot(model)
    spoil(model)
    accelerator.load_state(tmp_path)
    shared.weights_changed()
    assert tiny.same_bits(tiny.snapshot(model), before)
    assert tiny.same_bits(tiny.held(store), dict(model.named_parameters()))
    tiny.train_step(model, optimizer)
    shared.weights_changed()
    assert tiny.same_bits(tiny.snapshot(model), after)


@FAMILIES
def test_safetensors_saves_and_loads_the_model(tiny, tmp_path, family, tied):
    """E13: save_model and load_model of safetensors, which refuse or drop tensors that share storage."""
    model = tiny.model(family, tie_word_embeddings=tied)
    store, shared = tiny.share(model)
    before = tiny.snapshot(model)
    safetensors.torch.save_model(model, tmp_path / "model.safetensors")
    other = tiny.model(family, seed=9, tie_word_embeddings=tied)
    assert safetensors.torch.load_model(other, tmp_path / "model.safetensors") == (set(), [])
    assert tiny.same_bits(tiny.snapshot(other), before)
    spoil(model)
    safetensors.torch.load_model(model, tmp_path / "model.safetensors")
    shared.weights_changed()
    assert tiny.same_bits(tiny.held(store), {name: before[name] for name in tiny.held(store)})


@FAMILIES
def test_transformers_saves_what_it_loads(tiny, tmp_path, family, tied):
    """E13: save_pretrained, whole and sharded; from_pretrained gives every tensor back, bit for bit."""
    model = tiny.model(family, tie_word_embeddings=tied)
    tiny.share(model)
    for shard in ("5GB", "20KB"):
        model.save_pretrained(tmp_path / shard, max_shard_size=shard)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / shard)
        assert tiny.same_bits(tiny.snapshot(again), tiny.snapshot(model))


def through_torch_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@FAMILIES
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), through_torch_save]
)
def test_copies_are_whole_and_independent(tiny, family, tied, copied):
    """E13: deepcopy, pickle, torch.save: the same bits in memory of the copy's own, ties still tied."""
    model = tiny.model(family, tie_word_embeddings=tied)
    store, shared = tiny.share(model)
    before = tiny.snapshot(model)
    twin = copied(model)
    assert tiny.same_bits(tiny.snapshot(twin), before)
    assert (twin.lm_head.weight is twin.model.embed_tokens.weight) == tied
    spoil(twin)
    assert tiny.same_bits(tiny.snapshot(model), before) and tiny.same_bits(
        tiny.held(store), dict(model.named_parameters())
    )
    shared.check_storage()
    other, _ = tiny.share(copied(model))
    assert tiny.same_bits(tiny.held(other), tiny.held(store))


def test_a_saved_state_dict_is_no_larger_than_its_tensors(tiny):
    """E13: torch.save writes whole storages; each parameter's is its own, so nothing is written twice."""
    model = tiny.model()
    sizes = []
    for _ in range(2):
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        sizes.append(len(buffer.getvalue()))
        tiny.share(model)
    assert abs(sizes[1] - sizes[0]) < 200
    buffer.seek(0)
    assert tiny.same_bits(torch.load(buffer, weights_only=True), tiny.snapshot(model))


def test_a_tensor_sent_to_another_process_arrives(tiny):
    """Torch moves a storage into shared memory to send it: the values arrive, and the move is noticed."""
    model = tiny.model()
    _, shared = tiny.share(model)
    name = "model.layers.0.self_attn.k_proj.weight"
    before = model.get_parameter(name).detach().clone()
    sent = pickle.loads(ForkingPickler.dumps(model.get_parameter(name).detach()))
    assert torch.equal(sent, before) and torch.equal(model.get_parameter(name), before)
    with pytest.raises(WeightsInvalidError, match="k_proj"):
        shared.check_storage()
