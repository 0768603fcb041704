"""Owned slots: one region, aligned, parts side by side, addresses for life; exact writes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_rl.errors import EngineStateError
from tokenspeed_rl.weights import Part, Slot, WeightStore, randomise
from tokenspeed_rl.weights import store as store_module
from tokenspeed_rl.weights.mapping import Target
from tokenspeed_rl.weights.store import ALIGNMENT

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_are_aligned_and_parts_lie_side_by_side(tiny, dtype):
    """The fused tensor is a plain view of its parts, and every slot starts where vector loads want it."""
    store = tiny.store(tiny.config("Qwen2"), dtype)
    store.allocate()
    views = dict(store.parameters())
    spans = []
    for slot in store.slots:
        (fused,) = store.weights[slot.name]
        assert fused.data_ptr() % ALIGNMENT == 0 and fused.is_contiguous() and fused.shape == slot.shape
        address = fused.data_ptr()
        for part in slot.parts:
            assert views[part.hf_name].data_ptr() == address and views[part.hf_name].shape == part.shape
            address += views[part.hf_name].nbytes
        spans.append((fused.data_ptr(), address))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert store.nbytes == sum(view.nbytes for view in views.values())


def test_addresses_and_dict_stay_for_life(tiny):
    """Whoever captured an address keeps seeing the weights."""
    store = tiny.store(tiny.config())
    held = store.weights
    randomise(store, seed=0, std=0.02)
    before = {name: tensors[0].data_ptr() for name, tensors in store.weights.items()}
    store.allocate()
    randomise(store, seed=1, std=0.02)
    assert store.weights is held
    assert {name: tensors[0].data_ptr() for name, tensors in store.weights.items()} == before


@pytest.mark.parametrize("kind", ["plain", "transposed", "strided", "half", "double", "leaf"])
@pytest.mark.parametrize("fused", [True, False])
@settings(max_examples=15)
@given(
    rows=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    columns=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_whatever_is_written_is_what_is_read(rows, columns, fused, kind, seed):
    """Fused or by part, strided, empty, of another float dtype: as one cast would give it."""
    slot = Slot("s", tuple(Part(f"p{i}", (n, columns)) for i, n in enumerate(rows)))
    store = WeightStore((slot, Slot("guard", (Part("guard", ()),))), dtype=torch.float32, device="cpu")
    store.allocate()
    guard = Target(store.slots[1], 0, 1)
    store.write(guard, torch.tensor(7.0))
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(sum(rows), columns, generator=generator, dtype=torch.float64)
    if kind == "half":
        whole = whole.half()
    if kind in ("plain", "leaf"):
        whole = whole.float()
    expected = whole.float().clone()
    if kind == "transposed":
        whole = whole.t().contiguous().t()
    if kind == "strided":
        whole = torch.stack([whole, whole], dim=-1)[..., 0]
    pieces = [(Target(slot, 0, len(rows)), whole)]
    if not fused:
        pieces = [(Target(slot, i, i + 1), piece) for i, piece in enumerate(whole.split(rows))]
    written = sum(
        store.write(target, piece.detach().requires_grad_() if kind == "leaf" else piece)
        for target, piece in pieces
    )
    (held,) = store.weights["s"]
    assert torch.equal(held, expected) and not held.requires_grad
    assert written == held.nbytes
    assert store.weights["guard"][0].item() == 7.0


def test_a_tie_given_twice_must_agree(tiny, monkeypatch):
    """E4: a tied tensor agrees with what is there after one cast, NaN included, or it doesn't."""
    store = tiny.store(tiny.config(tie_word_embeddings=True))
    store.allocate()
    embedding = torch.randn(96, 32, generator=torch.Generator().manual_seed(0))
    embedding[3, 3] = float("nan")
    target = store.names.resolve("lm_head.weight")
    assert store.write(target, embedding) == embedding.nbytes
    strided = embedding.t().clone().t()
    assert store.agrees(target, embedding.double()) and store.agrees(target, embedding, strided)
    assert not store.agrees(target, embedding + 1) and not store.agrees(target, embedding, embedding.half())
    assert not store.agrees(target, embedding.nan_to_num())
    last = embedding.clone()
    last[-1, -1] += 1
    monkeypatch.setattr(store_module, "_AT_ONCE", 100)  # 3 rows at a time
    assert store.agrees(target, strided) and not store.agrees(target, last)


def test_no_incoming_tensor_stays_referenced(tiny):
    """A trainer's buffer is free again once written."""
    import weakref

    store = tiny.store(tiny.config())
    store.allocate()
    tensor = torch.ones(32)
    gone = weakref.ref(tensor)
    store.write(store.names.resolve("model.norm.weight"), tensor)
    del tensor
    assert gone() is None


def test_a_receipt_computes_its_checksum_late_but_never_of_other_weights(tiny):
    """Contract 6: the checksum is computed on first access; after another change it is refused, not wrong."""
    store = tiny.store(tiny.config())
    first = randomise(store, seed=0, std=0.02)
    assert first.checksum == store.checksum() and first.bytes == store.nbytes and first.version == "default"
    late = randomise(store, seed=1, std=0.02)
    randomise(store, seed=2, std=0.02)
    assert first.checksum != store.checksum()
    with pytest.raises(EngineStateError, match="before the next change"):
        _ = late.checksum
