"""Low-rank additions to a projection, against float64 and against PEFT's own layer."""

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn

from tokenspeed_rl.layers.lora import AdaptedRows, added_to
from tokenspeed_rl.layers.projection import project
from tokenspeed_rl.weights.adapters import Adapter, LowRank

INPUTS, SIZES = 24, (16, 8, 8)
"""Three parts side by side, as q, k and v."""


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def adapter(seed: int, *parts: int, rank: int = 3, dtype: torch.dtype = torch.float32) -> Adapter:
    """An adapter of some of the three parts of the slot "qkv"."""
    pairs = []
    for part in parts:
        start, size = sum(SIZES[:part]), SIZES[part]
        down = random(rank, INPUTS, seed=seed + part, dtype=dtype)
        up = random(size, rank, seed=seed + part + 50, dtype=dtype)
        pairs.append(LowRank(f"part {part}", start, start + size, down, up, 0.5 + seed))
    return Adapter({"qkv": tuple(pairs)})


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "in parts"])
@pytest.mark.parametrize("rows", [1, 5, 12, 40])
def test_rows_get_what_their_adapter_adds(rows: int, fused: bool, bias: bool) -> None:
    """H13: each row that of its adapter and no other, in any order, on any columns; the rest the base's."""
    x, weight = random(rows, INPUTS, seed=1), random(sum(SIZES), INPUTS, seed=2)
    shift = random(sum(SIZES), seed=3) if bias else None
    owner = torch.arange(rows) * 7 % 3  # 0: base
    adapters = (adapter(10, 0, 2), adapter(20, 1))
    adapted = [AdaptedRows(each, (owner == 1 + i).nonzero()[:, 0]) for i, each in enumerate(adapters)]
    expected = x.double() @ weight.double().T + (0 if shift is None else shift.double())
    for i, each in enumerate(adapters):
        for part in each.slots["qkv"]:
            delta = x.double() @ part.down.double().T @ part.up.double().T * part.scaling
            expected[:, part.start : part.stop] += delta * (owner == 1 + i)[:, None]
    parts = (weight,) if fused else weight.split(SIZES)
    biases = None if shift is None else (shift,) if fused else shift.split(SIZES)
    y = project(x, parts, biases, added_to("qkv", adapted))
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
    base = owner == 0
    assert torch.equal(y[base], project(x, parts, biases)[base]), (
        "rows of the base model are its own, bit for bit"
    )


DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),  # what PEFT makes of a bfloat16 model
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float32, torch.float64),
]


@pytest.mark.parametrize(("base", "own"), DTYPES, ids=str)
@pytest.mark.parametrize("some", [False, True], ids=["all rows", "some rows"])
@torch.no_grad()
def test_casts_are_pefts(base: torch.dtype, own: torch.dtype, some: bool) -> None:
    """H13: an adapter of another dtype than the base: the very bits that PEFT's layer gives."""
    low = adapter(4, 0, dtype=own).slots["qkv"][0]
    plain = nn.Linear(INPUTS, SIZES[0], bias=False, dtype=base)
    plain.weight.copy_(random(SIZES[0], INPUTS, seed=6))
    layer = Linear(plain, "x", LoraConfig(r=3), r=3, lora_alpha=3)
    for kind, values in ((layer.lora_A, low.down), (layer.lora_B, low.up)):
        kind["x"].weight = nn.Parameter(values.clone())
    layer.scaling["x"] = low.scaling
    x = random(6, INPUTS, seed=7, dtype=base)
    rows = torch.tensor([4, 1, 3]) if some else None
    y = project(x, (plain.weight,), None, [(rows, (low,))])
    assert y.dtype is base
    taken = slice(None) if rows is None else rows
    assert torch.equal(y[taken], layer(x)[taken])


def test_nothing_is_asked_of_a_slot_without_adapters() -> None:
    """An adapter of other projections costs this one nothing."""
    assert added_to("down", [AdaptedRows(adapter(1, 0), None)]) == []
    assert added_to("qkv", ()) == ()
