"""What works row by row: norms, gates, products, rotations."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_suite.checks.verdicts import Checks
from gpu_suite.machine import Machine
from tokenspeed_rl_kernels import add_rms_norm, linear, rope_write_kv, silu_mul
from tokenspeed_rl_kernels.rope_write_kv import reference as rope_reference

EPS = 1e-6


def check(machine: Machine, checks: Checks) -> None:
    """Each op with as few and as many rows as a step may have."""
    for hidden, wide in ((64, 96),) if machine.dry else ((576, 1536), (896, 4864), (1536, 8960)):
        for count in (1, 7) if machine.dry else (1, 64, 300):
            with checks.trial(f"add_rms_norm: {count} x {hidden}"):
                _norm(machine, checks, machine.random(count, hidden))
            with checks.trial(f"silu_mul: {count} x {wide}"):
                _gate(checks, machine.random(count, 2 * wide))
            for inputs, outputs in ((hidden, wide), (wide, hidden)):
                with checks.trial(f"linear: {count} x {inputs} -> {outputs}"):
                    weight = machine.random(outputs, inputs, seed=2, scale=0.05)
                    _product(checks, machine.random(count, inputs), weight)
    for heads, kv_heads, dim in ((4, 2, 16),) if machine.dry else ((14, 2, 64), (12, 2, 128)):
        with checks.trial(f"rope_write_kv: {heads}/{kv_heads} x {dim}"):
            _rotation(machine, checks, heads, kv_heads, dim)


def _norm(machine: Machine, checks: Checks, x: Tensor) -> None:
    residual, weight = machine.random(*x.shape, seed=2), machine.random(x.shape[1], seed=3)
    y, total = add_rms_norm(x, residual, weight, EPS)
    name = f"{len(x)} x {x.shape[1]}"

    def normed(total: Tensor, dtype: torch.dtype) -> Tensor:
        wide = total.to(dtype)
        return wide * (wide.pow(2).mean(1, keepdim=True) + EPS).rsqrt()

    true = normed(x + residual, torch.float64) * weight.double()  # of the sum as it is rounded
    checks.exact(f"add_rms_norm: {name}", y, normed(x + residual, torch.float32).to(x.dtype) * weight, true)
    checks.equal(f"add_rms_norm, the sum: {name}", total, x + residual, promised=True)
    alone = [add_rms_norm(x[i : i + 1], residual[i : i + 1], weight, EPS)[0] for i in range(len(x))]
    checks.equal(f"add_rms_norm, rows alone and together: {name}", y, torch.cat(alone))


def _gate(checks: Checks, x: Tensor) -> None:
    y, name = silu_mul(x), f"{len(x)} x {x.shape[1] // 2}"
    gate, value = x.chunk(2, 1)
    checks.exact(f"silu_mul: {name}", y, F.silu(gate) * value, F.silu(gate.double()) * value.double())
    alone = torch.cat([silu_mul(row) for row in x.split(1)])
    checks.equal(f"silu_mul, rows alone and together: {name}", y, alone)


def _product(checks: Checks, x: Tensor, weight: Tensor) -> None:
    bias, name = weight[:, 0].contiguous(), f"{len(x)} x {weight.shape[1]} -> {weight.shape[0]}"
    torchs = F.linear(x, weight, bias)
    true = F.linear(x.double(), weight.double(), bias.double())
    checks.exact(f"linear: {name}", linear(x, weight, bias), torchs, true)
    y = linear(x, weight, bias, invariant=True)
    checks.exact(f"linear, invariant: {name}", y, torchs, true)
    alone = torch.cat([linear(row, weight, bias, invariant=True) for row in x.split(1)])
    checks.equal(f"linear, invariant, rows alone and together: {name}", y, alone)


def _rotation(machine: Machine, checks: Checks, heads: int, kv_heads: int, dim: int) -> None:
    tokens, pages, size = 33, 8, 16
    q, k = machine.random(tokens, heads, dim), machine.random(tokens, kv_heads, dim, seed=2)
    v = machine.random(tokens, kv_heads, dim, seed=3)
    positions = torch.arange(tokens, device=machine.device) * 7
    angles = torch.outer(torch.arange(256), 1e6 ** -(torch.arange(0, dim, 2) / dim))
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1).to(machine.device)
    slots = torch.arange(tokens, device=machine.device) * 3
    slots[5] = -1
    norms = {"q_norm": machine.random(dim, seed=4), "k_norm": machine.random(dim, seed=5)}
    for name, given in (("plain", {}), ("head norms", norms)):

        def results(
            op: Callable[..., Tensor], dtype: torch.dtype, given: dict[str, Tensor] = given
        ) -> tuple[Tensor, ...]:
            caches = [torch.zeros(pages, kv_heads, size, dim, device=q.device, dtype=dtype) for _ in range(2)]
            cast = {key: weight.to(dtype) for key, weight in given.items()}
            table = cos_sin if dtype == q.dtype else cos_sin.to(q.dtype).to(dtype)
            out = op(q.to(dtype), k.to(dtype), v.to(dtype), positions, table, *caches, slots, **cast)
            return out, *caches

        ours = results(rope_write_kv, q.dtype)
        torchs, true = results(rope_reference, q.dtype), results(rope_reference, torch.float64)
        parts = ("queries", "keys", "values")
        for part, *three in zip(parts, ours, torchs, true, strict=True):
            checks.exact(f"rope_write_kv, {part}, {name}: {heads}/{kv_heads} x {dim}", *three)
