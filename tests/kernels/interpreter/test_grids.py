"""Grids of launches: CUDA has 2^31 - 1 programs along the first axis and 65,535 along the others."""

from typing import Any

import pytest
import torch

from tokenspeed_rl_kernels import (
    add_rms_norm,
    linear,
    paged_decode,
    paged_prefill,
    rope_write_kv,
    sample,
    silu_mul,
)
from tokenspeed_rl_kernels.gpu.kernel import Build

MANY = 70_000
HALF = torch.float16


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Any:
    return torch.zeros(shape, dtype=dtype)


def halves(*shape: int) -> Any:
    return torch.zeros(shape, dtype=HALF)


CACHES = halves(1, 1, 16, 16), halves(1, 1, 16, 16)
LONGS = ints(MANY, dtype=torch.int64)
CALLS = {
    "silu_mul": lambda: silu_mul(halves(MANY, 4)),
    "add_rms_norm": lambda: add_rms_norm(halves(MANY, 4), halves(MANY, 4), halves(4), 1e-6),
    "rope_write_kv": lambda: rope_write_kv(
        *(halves(MANY, 1, 16) for _ in range(3)), LONGS, torch.zeros(1, 16), *CACHES, LONGS
    ),
    "linear": lambda: linear(halves(16 * MANY, 16), halves(8, 16), invariant=True),
    "a wide linear": lambda: linear(halves(2, 16), halves(262_144, 16)),
    "paged_decode": lambda: paged_decode(halves(MANY, 1, 16), *CACHES, ints(MANY, 1), ints(MANY)),
    "paged_prefill": lambda: paged_prefill(
        halves(16 * MANY, 1, 16), *CACHES, ints(MANY, 1), torch.arange(MANY + 1).int() * 16, ints(MANY)
    ),
    "sample": lambda: sample(
        torch.zeros(MANY, 2), *(torch.zeros(MANY), ints(MANY)), *torch.zeros(2, MANY), LONGS, LONGS
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_many_rows_fit_the_grid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """70,000 rows, or a vocabulary of 262,144, launch on the axis that has room."""
    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(Build, "run", lambda self, kernel, grid, *args: grids.append(tuple(grid)))
    CALLS[name]()
    assert grids
    for first, *others in grids:
        assert first < 2**31 and all(size <= 65_535 for size in others)
