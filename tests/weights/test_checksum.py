"""The checksum that trainer and engine compare: equal exactly when names, shapes, dtypes and bytes are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.weights import checksum

LAST = torch.arange(12).view(3, 4) == 11


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {f"w{i}": torch.randn(3, 4, generator=generator) for i in range(4)}


def test_engine_and_trainer_agree_without_talking(tiny):
    """From named_parameters, from a prefixed state dict and from the engine's slots: one number."""
    for tied in (False, True):
        model = tiny.model("Qwen3", tie_word_embeddings=tied)
        expected = checksum(model.named_parameters())
        store, shared = tiny.share(model)
        prefixed = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
        assert store.checksum() == shared.receipt.checksum == checksum(prefixed) == expected


def test_cast_before_digest(tiny):
    """An fp32 trainer gets the number of its bf16 engine by naming the dtype."""
    weights = tensors()
    half = {name: tensor.bfloat16() for name, tensor in weights.items()}
    assert checksum(weights, dtype=torch.bfloat16) == checksum(half) != checksum(weights)


@given(st.permutations(range(4)))
def test_order_does_not_count(order):
    """Buckets arrive in any order."""
    weights = list(tensors().items())
    assert checksum(weights[i] for i in order) == checksum(weights)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: {**w, "w0": w["w1"], "w1": w["w0"]},
        lambda w: {**w, "w2": w["w2"].view(4, 3)},
        lambda w: {**w, "w2": w["w2"].view(torch.int32)},
        lambda w: {name: t for name, t in w.items() if name != "w3"},
        lambda w: {
            **w,
            "w0": torch.where(LAST, w["w0"].nextafter(w["w0"] + 1), w["w0"]),
        },
    ],
    ids=["swapped", "reshaped", "other dtype", "missing", "one bit"],
)
def test_any_difference_shows(change):
    """A swap, another shape or dtype, a missing tensor, the last bit of one value."""
    assert checksum(change(tensors())) != checksum(tensors())


def test_strides_do_not_count_and_odd_tensors_do():
    """Views, 0-dim and empty tensors are digested by value and shape; zero's sign and NaN by bits."""
    weights = tensors()
    turned = {name: tensor.t().contiguous().t() for name, tensor in weights.items()}
    assert checksum(turned) == checksum(weights)
    assert checksum({"a": torch.tensor(1.0)}) != checksum({"a": torch.tensor([1.0])})
    assert checksum({"a": torch.empty(0, 3)}) != checksum({"a": torch.empty(3, 0)})
    assert checksum({"a": torch.tensor(0.0)}) != checksum({"a": torch.tensor(-0.0)})
    assert checksum({"a": torch.tensor(float("nan"))}) == checksum({"a": torch.tensor(float("nan"))})


def test_freed_memory_is_an_error():
    """A trainer that has freed a parameter's storage gets an error, not a dead process."""
    tensor = torch.zeros(4, 4)
    tensor.untyped_storage().resize_(60)
    with pytest.raises(RequestError, match=r"freed or cut short.*torch\.float32 \[4, 4\]"):
        checksum({"w": tensor})
