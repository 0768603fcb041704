"""Names lead to the right rows of the right slot, however spelled, and a wrong set is refused whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_rl.errors import WeightUpdateError
from tokenspeed_rl.weights import Part, Slot
from tokenspeed_rl.weights.mapping import Coverage, NameMap, canonical

PREFIXES = [
    "",
    "module.",
    "_orig_mod.",
    "base_model.model.",
    "module._orig_mod.",
    "_orig_mod.module.base_model.model.",
]
QKV = "model.layers.0.self_attn.qkv_proj.weight"


@pytest.fixture
def names(tiny) -> NameMap:
    return NameMap(tiny.slots(tiny.config("Qwen2")))


@pytest.fixture
def tied(tiny) -> NameMap:
    return NameMap(tiny.slots(tiny.config(tie_word_embeddings=True)))


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_hugging_face_name_resolves_to_its_own_part(names, prefix):
    """E3: a wrapper's prefix changes nothing, and no two names lead to one place."""
    seen = set()
    for name in names.hf_names:
        target = names.resolve(prefix + name)
        assert target is not None and [part.hf_name for part in target.parts] == [name]
        seen.add((target.slot.name, target.start))
    assert len(seen) == len(names.hf_names)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(
    ("fused", "slot", "rows"),
    [
        ("model.layers.1.self_attn.qkv_proj.weight", "layers.1.qkv.weight", 64),
        ("model.layers.1.self_attn.qkv_proj.bias", "layers.1.qkv.bias", 64),
        ("model.layers.0.mlp.gate_up_proj.weight", "layers.0.gate_up.weight", 96),
        ("layers.0.qkv.weight", "layers.0.qkv.weight", 64),
        ("embed", "embed", 96),
    ],
)
def test_fused_names_cover_a_whole_slot(names, prefix, fused, slot, rows):
    """E3: the names under which vLLM and SGLang fuse projections, and our own slot names, are understood."""
    target = names.resolve(prefix + fused)
    assert target is not None and target.slot.name == slot
    assert target.shape == target.slot.shape and target.shape[0] == rows


def test_compiled_submodules_keep_their_names():
    """E3: torch.compile and data parallel wrappers leave their mark inside a name as well as in front."""
    assert (
        canonical("model.layers.0._orig_mod.mlp.module.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    )


def test_the_head_of_a_tied_model_is_the_embedding(tied, names):
    """E4: `lm_head.weight` leads to the embedding when tied, and to a slot of its own when not."""
    assert tied.tied and tied.resolve("module.lm_head.weight") == tied.resolve("model.embed_tokens.weight")
    assert not names.tied and names.resolve("lm_head.weight") != names.resolve("model.embed_tokens.weight")
    assert "lm_head.weight" not in tied.hf_names


def shapes(names: NameMap) -> dict[str, tuple[int, ...]]:
    return {part.hf_name: part.shape for slot in names.slots for part in slot.parts}


def test_a_complete_set_passes_in_any_mixture_of_spellings(names):
    """E3: fused and unfused names mixed make one complete set, ties and derived buffers aside."""
    coverage = Coverage(names)
    given_shapes = shapes(names)
    for projection in "qkv":
        given_shapes.pop(f"model.layers.0.self_attn.{projection}_proj.weight")
    given_shapes[QKV] = (64, 32)
    given_shapes["model.layers.0.self_attn.rotary_emb.inv_freq"] = (4,)
    for name, shape in given_shapes.items():
        coverage.claim("module." + name, shape)
    coverage.check()
    assert coverage.loaded == tuple(names.hf_names) and coverage.missing == ()


@pytest.mark.parametrize(
    "order",
    [("lm_head.weight", "model.embed_tokens.weight"), ("model.embed_tokens.weight", "lm_head.weight")],
)
def test_both_names_of_a_tie_count_once(tied, order):
    """E4: embedding and head given both is no repetition; the second is marked as to be compared."""
    coverage = Coverage(tied)
    claims = [coverage.claim(name, (96, 32)) for name in order]
    assert [claim is not None and claim.again for claim in claims] == [False, True]
    assert coverage.loaded == ("model.embed_tokens.weight",) and coverage.repeated == []


def test_offenders_are_counted_and_named(names):
    """Missing, unknown, mis-shaped and repeated are told apart, with counts and first names."""
    coverage = Coverage(names)
    coverage.claim("model.norm.weight", (32,))
    coverage.claim("module.model.norm.weight", (32,))
    coverage.claim("lm_head.weight", (32, 96))
    coverage.claim("model.layers.7.mlp.up_proj.weight", (48, 32))
    coverage.claim("model.layers.0.self_attn.q_proj.lora_A.weight", (4, 32))
    with pytest.raises(WeightUpdateError) as caught:
        coverage.check()
    message = str(caught.value)
    count = len(names.hf_names) - 2
    assert f"{count} missing, 2 unknown, 1 mis-shaped, 1 given twice" in message
    assert "model.embed_tokens.weight" in message and "model.layers.7.mlp.up_proj.weight" in message
    assert "lm_head.weight [32, 96] instead of [96, 32]" in message
    assert len(message) < 900


def test_a_part_written_fused_and_alone_is_given_twice(names):
    """Q_proj beside qkv_proj would depend on order, so it is an offence, not a preference."""
    coverage = Coverage(names)
    assert coverage.claim(QKV, (64, 32)) is not None
    assert coverage.claim("model.layers.0.self_attn.k_proj.weight", (16, 32)) is None
    assert coverage.repeated == ["model.layers.0.self_attn.k_proj.weight"]


def test_a_partial_set_is_judged_without_what_it_leaves_out(names):
    """A partial update is no offence for what is missing, but still for what is unknown."""
    coverage = Coverage(names)
    coverage.claim("model.norm.weight", (32,))
    coverage.check(complete=False)
    coverage.claim("model.nrom.weight", (32,))
    with pytest.raises(WeightUpdateError, match="1 unknown"):
        coverage.check(complete=False)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 3), st.data())
def test_coverage_equals_a_set_of_names(rows, columns, data):
    """Whatever names are claimed, in any order: loaded and missing split the parts, as plain sets would."""
    parts = tuple(Part(f"m.p{i}_proj.weight", (n, columns)) for i, n in enumerate(rows))
    coverage = Coverage(NameMap((Slot("s", parts), Slot("scalar", (Part("m.scale", ()),)))))
    everything = {part.hf_name: part.shape for part in parts} | {"m.scale": ()}
    chosen = data.draw(st.lists(st.sampled_from(sorted(everything)), unique=True))
    assert all(coverage.claim(name, everything[name]) is not None for name in chosen)
    assert set(coverage.loaded) == set(chosen) and set(coverage.missing) == set(everything) - set(chosen)
