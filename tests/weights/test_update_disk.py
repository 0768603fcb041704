"""Weights replaced from disk: judged by their headers first, so a refusal leaves every bit where it was."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tokenspeed_rl.errors import ConfigError, TokenSpeedError, WeightUpdateError
from tokenspeed_rl.weights import WeightUpdate, checksum, randomise, read_checkpoint
from tokenspeed_rl.weights.shards import INDEX, SINGLE

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def store(tiny):
    store = tiny.store(tiny.config())
    randomise(store, seed=0, std=0.02)
    return store


@pytest.fixture(params=["5GB", "20KB"])
def saved(tiny, tmp_path, request):
    """Another model's weights, in one file or in several."""
    tiny.model(seed=7).save_pretrained(tmp_path, max_shard_size=request.param)
    return tmp_path


def update_from(store, directory, **options):
    update = WeightUpdate(store, kind="disk", **options)
    try:
        update.run(read_checkpoint(update, directory))
        return update.commit()
    except BaseException as error:
        update.fail(str(error))
        raise


def test_the_bits_of_the_checkpoint_are_in_place(tiny, store, saved):
    """D1, E6: what transformers loads from there, in place, as a new version."""
    addresses = {name: tensors[0].data_ptr() for name, tensors in store.weights.items()}
    reference = dict(AutoModelForCausalLM.from_pretrained(saved).named_parameters())
    epoch = store.version.epoch
    receipt = update_from(store, saved, label="step 7")
    assert tiny.same_bits(tiny.held(store), reference)
    assert {name: tensors[0].data_ptr() for name, tensors in store.weights.items()} == addresses
    assert (receipt.kind, receipt.version, receipt.bytes) == ("disk", "step 7", store.nbytes)
    assert receipt.checksum == checksum(reference) and store.version.epoch == epoch + 1


def truncate(directory):
    path = sorted(directory.glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:-1])


def lose_a_shard(directory):
    sorted(directory.glob("*.safetensors"))[0].unlink()


def pickle_only(directory):
    for path in [*directory.glob("*.safetensors"), *directory.glob(INDEX)]:
        path.unlink()
    (directory / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")


def quantise(directory):
    path = sorted(directory.glob("*.safetensors"))[-1]
    weights = load_file(path)
    name = sorted(weights)[0]
    save_file(weights | {name: torch.zeros(weights[name].shape, dtype=torch.int8)}, path)


def other_model(directory):
    path = sorted(directory.glob("*.safetensors"))[-1]
    save_file({name + "x": tensor for name, tensor in load_file(path).items()}, path)
    if (directory / INDEX).exists():
        index = json.loads((directory / INDEX).read_text())
        where = index["weight_map"]
        index["weight_map"] = {name + "x" * (where[name] == path.name): where[name] for name in where}
        (directory / INDEX).write_text(json.dumps(index))


DAMAGE = {
    "truncated file": (truncate, ConfigError, "safetensors file"),
    "missing shard": (lose_a_shard, ConfigError, "missing|holds neither"),
    "pickle only": (pickle_only, ConfigError, "pickle files only"),
    "quantised": (quantise, ConfigError, "not plain floats"),
    "other model": (other_model, WeightUpdateError, "missing, .* unknown"),
}


@pytest.mark.parametrize("why", DAMAGE)
def test_what_is_refused_is_refused_before_anything_is_written(tiny, store, saved, why):
    """E7: nothing has changed, neither a bit of the weights nor the version."""
    damage, kind, message = DAMAGE[why]
    damage(saved)
    before, version = tiny.held(store), vars(store.version).copy()
    update = WeightUpdate(store, kind="disk")
    with pytest.raises(kind, match=message):
        read_checkpoint(update, saved)  # at the call, not at the first tensor
    update.fail("")
    assert tiny.same_bits(tiny.held(store), before) and vars(store.version) == version


@pytest.mark.parametrize("path", ["nowhere", "file.safetensors"])
def test_a_path_that_is_no_directory_is_refused(store, tmp_path, path):
    """E7: a missing path, or a file: refused with the path."""
    (tmp_path / "file.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=path):
        read_checkpoint(WeightUpdate(store, kind="disk"), tmp_path / path)


@pytest.mark.parametrize("atomic", [True, False])
def test_a_file_cut_short_after_it_was_judged_is_an_error(tiny, store, saved, atomic):
    """E7, E14: a trainer overwrites the file while it is read: a typed error, no crash, nothing hidden."""
    before = tiny.held(store)
    update = WeightUpdate(store, kind="disk", atomic=atomic)
    named = read_checkpoint(update, saved)
    truncate(saved)
    with pytest.raises(TokenSpeedError, match="could not be read"):
        update.run(named)
    wrote = update.wrote
    update.fail("cut short")
    assert wrote and store.version.valid is atomic
    assert tiny.same_bits(tiny.held(store), before) is atomic


def test_tensors_are_read_one_at_a_time(store, saved):
    """Contract 6: at most one tensor is in memory beside the weights."""
    alive: list[weakref.ref] = []
    for _, tensor in read_checkpoint(WeightUpdate(store, kind="disk"), saved):
        assert all(ref() is None for ref in alive)
        alive.append(weakref.ref(tensor))
        del tensor
    assert len(alive) == len(store.names.hf_names)


def test_a_tie_that_differs_on_disk_is_refused_before_anything_is_written(tiny, tmp_path):
    """E4, E7: both names of a tied weight in the files: alike they count once, different they are refused."""
    model = tiny.model(tie_word_embeddings=True)
    store = tiny.store(model.config)
    randomise(store, seed=0, std=0.02)
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    save_file(weights | {HEAD: weights[EMBED] + 1}, tmp_path / SINGLE)
    before = tiny.held(store)
    with pytest.raises(WeightUpdateError, match="tie_word_embeddings"):
        read_checkpoint(WeightUpdate(store, kind="disk"), tmp_path)
    assert tiny.same_bits(tiny.held(store), before)
    save_file(weights | {HEAD: weights[EMBED].clone()}, tmp_path / SINGLE)
    receipt = update_from(store, tmp_path)
    assert tiny.same_bits(tiny.held(store), weights) and receipt.bytes == store.nbytes


@pytest.mark.parametrize("stored", [torch.float64, torch.float16, torch.bfloat16])
def test_other_floats_and_odd_shapes_are_read_exactly(tiny, store, tmp_path, stored):
    """E5: any float dtype on disk, cast once; what follows from the config is skipped."""
    weights = {name: tensor.detach().to(stored) for name, tensor in tiny.model(seed=3).named_parameters()}
    save_file(weights | {"model.rotary_emb.inv_freq": torch.ones(4)}, tmp_path / SINGLE)
    update_from(store, tmp_path)
    assert tiny.same_bits(tiny.held(store), {name: tensor.float() for name, tensor in weights.items()})
