"""Weights from disk are what transformers loads, bit for bit, or a refusal naming file and fault."""

from __future__ import annotations

import json
import random
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tokenspeed_rl.errors import ConfigError, TokenSpeedError, WeightUpdateError
from tokenspeed_rl.weights import checksum, load_checkpoint, randomise
from tokenspeed_rl.weights.shards import INDEX, SINGLE, read_header


@pytest.fixture
def saved(tiny, tmp_path):
    """A one-file checkpoint of a tiny untied Llama."""
    tiny.model().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tiny, tmp_path):
    """The same in several shards with an index."""
    tiny.model().save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def refused(tiny, directory, kind=ConfigError) -> str:
    """The message with which loading is refused; the store then holds nothing."""
    store = tiny.store(tiny.config())
    with pytest.raises(kind) as caught:
        load_checkpoint(store, directory)
    assert not store.version.valid and store.weights == {}
    return str(caught.value)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_loads_what_transformers_loads(tiny, tmp_path, family, tied, shard):
    """E4: whole or sharded, tied or not: the fused slots hold exactly the reference's parameters."""
    tiny.model(family, tie_word_embeddings=tied).save_pretrained(tmp_path, max_shard_size=shard)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    store = tiny.store(reference.config)
    receipt = load_checkpoint(store, tmp_path)
    assert tiny.same_bits(tiny.held(store), dict(reference.named_parameters()))
    assert receipt.loaded == tuple(store.names.hf_names) and receipt.bytes == store.nbytes
    assert (receipt.missing, receipt.unknown, receipt.version) == ((), (), "default")
    assert receipt.checksum == checksum(reference.named_parameters())
    assert store.version.valid


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_casts_once_from_any_float_dtype(tiny, tmp_path, stored, dtype):
    """Any float dtype on disk, any in the engine: as one cast gives it."""
    weights = {name: tensor.to(stored) for name, tensor in tiny.model().state_dict().items()}
    save_file(weights, tmp_path / SINGLE)
    store = tiny.store(tiny.config(), dtype)
    load_checkpoint(store, tmp_path)
    assert tiny.same_bits(tiny.held(store), {name: tensor.to(dtype) for name, tensor in weights.items()})


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model."])
def test_prefixed_and_fused_names_load_alike(tiny, saved, prefix):
    """E3: prefixes and fused names mixed give the same weights, or an error; nothing is skipped."""
    weights = load_file(saved / SINGLE)
    expected = dict(weights)
    at = "model.layers.1.mlp."
    weights[at + "gate_up_proj.weight"] = torch.cat(
        [weights.pop(f"{at}{p}_proj.weight") for p in ("gate", "up")]
    )
    at = "model.layers.0.self_attn."
    weights[at + "qkv_proj.weight"] = torch.cat([weights.pop(f"{at}{p}_proj.weight") for p in "qkv"])
    save_file({prefix + name: tensor for name, tensor in weights.items()}, saved / SINGLE)
    store = tiny.store(tiny.config())
    load_checkpoint(store, saved)
    assert tiny.same_bits(tiny.held(store), expected)


def test_a_tied_checkpoint_may_carry_either_name_or_both(tiny, tmp_path):
    """E4: embedding only, head only, both alike: one weight, counted once. Both and different: refused."""
    model = tiny.model(tie_word_embeddings=True)
    expected = dict(model.named_parameters())
    rest = {name: tensor.detach() for name, tensor in expected.items() if "embed" not in name}
    embedding = expected["model.embed_tokens.weight"].detach()
    cases = [
        ("model.embed_tokens.weight",),
        ("lm_head.weight",),
        ("model.embed_tokens.weight", "lm_head.weight"),
    ]
    for names in cases:
        save_file(rest | {name: embedding.clone() for name in names}, tmp_path / SINGLE)
        store = tiny.store(model.config)
        receipt = load_checkpoint(store, tmp_path)
        assert tiny.same_bits(tiny.held(store), expected)
        assert receipt.loaded == tuple(store.names.hf_names) and receipt.bytes == store.nbytes
    save_file(rest | {cases[2][0]: embedding, cases[2][1]: embedding + 1}, tmp_path / SINGLE)
    store = tiny.store(model.config)
    with pytest.raises(WeightUpdateError, match="tie_word_embeddings"):
        load_checkpoint(store, tmp_path)
    assert not store.version.valid


def test_a_checkpoint_of_another_model_is_refused_before_a_byte_is_written(tiny, tmp_path):
    """Another size, missing and unknown tensors: counts and first names; nothing was allocated."""
    tiny.model("Qwen3", hidden_size=64, num_hidden_layers=1).save_pretrained(tmp_path)
    message = refused(tiny, tmp_path, WeightUpdateError)
    assert "9 missing, 2 unknown, 12 mis-shaped" in message
    assert "model.layers.1.input_layernorm.weight" in message and "q_norm" in message


def test_pickle_files_are_never_read(tiny, tmp_path):
    """E7: a directory with pickle weights only is refused, saying so; the file isn't opened as one."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    message = refused(tiny, tmp_path)
    assert "pickle" in message and "pytorch_model.bin" in message and "safetensors" in message


def test_an_empty_directory_says_what_it_looked_for(tiny, tmp_path):
    """E7: neither file: the error names both, what is there instead, and what to do."""
    (tmp_path / "notes.txt").write_text("hello")
    message = refused(tiny, tmp_path)
    assert SINGLE in message and INDEX in message and "notes.txt" in message


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 2000, -1])
def test_a_truncated_file_is_named(tiny, saved, keep):
    """E7: cut anywhere, in the length, the header or the data: refused before anything is read."""
    path = saved / SINGLE
    raw = path.read_bytes()
    path.write_bytes(raw[:keep])
    assert str(path) in refused(tiny, saved)


def test_a_missing_shard_is_named_with_what_it_held(tiny, sharded):
    """E7: one shard of several gone."""
    lost = sorted(sharded.glob("*.safetensors"))[1]
    lost.unlink()
    message = refused(tiny, sharded)
    assert str(lost) in message and "missing" in message


def test_an_index_of_another_checkpoint_is_refused(tiny, sharded):
    """E7: the index says a tensor is in a shard that doesn't have it."""
    index = json.loads((sharded / INDEX).read_text())
    shards = sorted(set(index["weight_map"].values()))
    name = next(name for name, shard in index["weight_map"].items() if shard == shards[0])
    index["weight_map"][name] = shards[1]
    (sharded / INDEX).write_text(json.dumps(index))
    assert name in refused(tiny, sharded)


@pytest.mark.parametrize(
    "shard",
    ["../model.safetensors", "/etc/passwd.safetensors", "a/b.safetensors", "..\\x.safetensors", "w.bin", 3],
)
def test_shards_outside_the_directory_are_refused(tiny, sharded, shard):
    """E7: an index can't make the engine read a file elsewhere, nor a pickle."""
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = shard
    (sharded / INDEX).write_text(json.dumps(index))
    message = refused(tiny, sharded)
    assert "model.norm.weight" in message and repr(shard) in message


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "\xff", '{"weight_map": {'])
def test_a_broken_index_is_named(tiny, sharded, text):
    """E7: an index that is no index."""
    (sharded / INDEX).write_text(text, encoding="latin-1")
    assert INDEX in refused(tiny, sharded)


def craft(path, header: object, data: bytes = b"", length: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)


F32 = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("header", "data", "length"),
    [
        ({"a": F32}, b"x" * 16, 2**63),
        ({"a": F32}, b"x" * 16, 10**8 + 1),
        ({"a": F32}, b"x" * 15, None),
        ({"a": F32}, b"x" * 17, None),
        ({"a": F32 | {"data_offsets": [0, 8]}}, b"x" * 8, None),
        ({"a": F32 | {"data_offsets": [16, 0]}}, b"x" * 16, None),
        ({"a": F32 | {"data_offsets": [-16, 0]}}, b"x" * 16, None),
        ({"a": F32 | {"shape": [2, -2]}}, b"x" * 16, None),
        ({"a": F32 | {"shape": [2, 2.0]}}, b"x" * 16, None),
        ({"a": F32 | {"shape": [True, 4]}}, b"x" * 16, None),
        ({"a": F32 | {"shape": 4}}, b"x" * 16, None),
        ({"a": F32 | {"dtype": "F31"}}, b"x" * 16, None),
        ({"a": F32 | {"dtype": ["F32"]}}, b"x" * 16, None),
        ({"a": F32, "b": F32}, b"x" * 16, None),
        ({"a": F32 | {"data_offsets": [16, 32]}}, b"x" * 32, None),
        ({"a": F32 | {"data_offsets": [0, 16, 3]}}, b"x" * 16, None),
        ({"a": {"dtype": "F32"}}, b"", None),
        ({"a": 3}, b"", None),
        ([1, 2], b"", None),
        (b"{", b"", None),
        (b"\xff\xfe", b"", None),
        (b"[" * 100_000, b"", None),
    ],
)
def test_headers_are_bounds_checked(tmp_path, header, data, length):
    """E7: lengths, offsets, shapes and dtypes that don't fit the file are refused, naming it."""
    path = tmp_path / SINGLE
    craft(path, header, data, length)
    with pytest.raises(ConfigError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_random_damage_never_loads_and_never_crashes(tiny, saved):
    """E7: bytes changed in the header: either the same tensors are read, or the refusal is typed."""
    path = saved / SINGLE
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    draw = random.Random(0)
    for _ in range(150):
        damaged = bytearray(raw)
        for _ in range(draw.randint(1, 3)):
            damaged[draw.randrange(8 + length)] = draw.randrange(256)
        path.write_bytes(damaged)
        store = tiny.store(tiny.config())
        try:
            load_checkpoint(store, saved)
        except TokenSpeedError:
            assert not store.version.valid


def test_quantised_tensors_are_refused_by_name(tiny, saved):
    """A checkpoint whose weights are integers or 8-bit floats would load as nonsense: refused."""
    weights = load_file(saved / SINGLE)
    weights["model.layers.0.mlp.down_proj.weight"] = torch.zeros(32, 48, dtype=torch.int8)
    save_file(weights, saved / SINGLE)
    message = refused(tiny, saved)
    assert "model.layers.0.mlp.down_proj.weight is I8" in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_weights_are_seeded_scaled_and_complete(tiny, dtype):
    """F14: a seed is one set of weights; norms 1, biases 0, the rest of the deviation asked for."""
    config = tiny.config("Qwen2", hidden_size=128, intermediate_size=256, vocab_size=512)
    digests = []
    for seed in (0, 0, 1):
        store = tiny.store(config, dtype)
        store.allocate()
        for (tensor,) in store.weights.values():
            tensor.fill_(float("nan"))
        receipt = randomise(store, seed=seed, std=0.02)
        digests.append(receipt.checksum)
        assert store.version.valid and receipt.bytes == store.nbytes
    assert digests[0] == digests[1] != digests[2]
    for name, tensor in tiny.held(store).items():
        if "norm" in name:
            assert bool((tensor == 1).all())
        elif name.endswith("bias"):
            assert bool((tensor == 0).all())
        else:
            values = tensor.double()
            assert abs(values.std().item() / 0.02 - 1) < 0.03 and abs(values.mean().item()) < 1e-3


def test_loading_and_initialising_touch_no_global_random_state(tiny, saved):
    """F14: torch, numpy and random are where they were."""

    def states() -> tuple:
        kind, keys, *rest = np.random.get_state()
        return torch.get_rng_state().tolist(), random.getstate(), kind, keys.tolist(), rest

    before = states()
    load_checkpoint(tiny.store(tiny.config()), saved)
    randomise(tiny.store(tiny.config()), seed=5, std=0.02)
    assert states() == before
