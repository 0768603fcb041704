"""Noise from counters in Triton: the numbers that the CPU makes."""

import torch
import triton
import triton.language as tl

from tokenspeed_rl_kernels import gumbel as cpu
from tokenspeed_rl_kernels.gpu import gumbel as gpu

ITEMS = 128


@triton.jit
def noise_kernel(seeds, positions, mixed, out, ROWS: tl.constexpr, ITEMS: tl.constexpr):
    row = tl.arange(0, ROWS)
    item = tl.arange(0, ITEMS)
    key = gpu.substream(gpu.row_key(tl.load(seeds + row), tl.load(positions + row)), 2)
    tl.store(mixed + row, gpu.mix(key).to(tl.int64, bitcast=True))
    tl.store(out + row[:, None] * ITEMS + item[None, :], gpu.gumbel(key[:, None], item[None, :]))


@triton.jit
def extremes_kernel(words, out, NUMBER: tl.constexpr):
    at = tl.arange(0, NUMBER)
    tl.store(out + at, gpu.gumbel_of(tl.load(words + at).to(tl.uint64, bitcast=True)))


def test_noise_equals_the_cpu_s():
    """Keys bit for bit, of any sign; noise to a few units in the last place: 32768 numbers."""
    seeds = torch.randint(-(2**63), 2**63 - 1, (256,), generator=torch.Generator().manual_seed(0))
    seeds[:6] = torch.tensor([0, 1, -1, 2**62, -(2**63), 2**63 - 1])
    positions = torch.arange(256) * 7919 - 3
    mixed, out = torch.empty_like(seeds), torch.empty(256, ITEMS, dtype=torch.float64)
    noise_kernel[(1,)](seeds, positions, mixed, out, ROWS=256, ITEMS=ITEMS)
    keys = cpu.substream(cpu.row_keys(seeds, positions), 2)
    assert torch.equal(mixed, cpu.mix(keys))
    torch.testing.assert_close(out, cpu.gumbel(keys, torch.arange(ITEMS)[None]), rtol=2e-15, atol=1e-15)


def test_extreme_words(monkeypatch):
    """Both ends are finite and the CPU's: the tail at u -> 0 in full precision, and u = 1 kept away from."""
    words = [*range(64), *(2**k for k in range(6, 63)), *(2**63 - 1 - 2**k for k in range(63))]
    words += [w - 2**63 for w in words] + [-1] * 8
    words = torch.tensor((words * 2)[:512])
    out = torch.empty(512, dtype=torch.float64)
    extremes_kernel[(1,)](words, out, NUMBER=512)
    monkeypatch.setitem(cpu.gumbel.__globals__, "mix", lambda x: words[None])
    expected = cpu.gumbel(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64))[0]
    assert out.isfinite().all() and out.max() > 44.3 and out.min() < -3.6
    torch.testing.assert_close(out, expected, rtol=2e-15, atol=1e-15)
