"""Paged decode and prefill, with each option, shared and not."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gpu_suite.checks.verdicts import Checks
from gpu_suite.machine import Machine
from gpu_suite.paged import Contexts, attend, contexts
from tokenspeed_rl_kernels import paged_decode, paged_prefill

HEADS = ((14, 2, 64), (12, 2, 128), (9, 3, 64))
"""Query heads, their KV heads and dims: Qwen2.5 0.5B and 1.5B, SmolLM2."""
Options = dict[str, Any]


def check(machine: Machine, checks: Checks) -> None:
    """Lengths at the edges of pages and splits, none among them."""
    lens = [1, 40, 63, 0, 70] if machine.dry else [1, 0, 17, 255, 256, 257, 511, 2048, 3001, 700]
    prefix = 32 if machine.dry else 512
    for heads, kv_heads, dim in HEADS[: 1 if machine.dry else None]:
        rows = contexts(lens, kv_heads=kv_heads, dim=dim, device=machine.device, prefix=prefix)
        options_of = dict(_options(machine.random(heads).float()))
        for name in options_of if heads == HEADS[0][0] else ("plain", "all options"):  # each is compiled anew
            options = options_of[name]
            label = f"{name}, {heads}/{kv_heads} x {dim}"
            with checks.trial(f"paged_decode: {label}"):
                _decode(checks, label, machine.random(len(lens), heads, dim), rows, options)
            counts = [min(length, 33) for length in lens]
            with checks.trial(f"paged_prefill: {label}"):
                _prefill(checks, label, machine.random(sum(counts), heads, dim), rows, counts, options)


def _options(sinks: Tensor) -> Iterator[tuple[str, Options]]:
    yield "plain", {}
    yield "window", {"window": 40}
    yield "softcap", {"softcap": 5.0}
    yield "sinks", {"sinks": sinks}
    yield "all options", {"window": 300, "softcap": 20.0, "sinks": sinks}


def _decode(checks: Checks, label: str, q: Tensor, rows: Contexts, options: Options) -> None:
    apart = paged_decode(q, *rows.paged(), **options)
    together = paged_decode(q, *rows.paged(), **options, shared=rows.shared)
    dense = _dense(q.split(1), rows, options)
    checks.exact(f"paged_decode: {label}", apart, *dense)
    checks.exact(f"paged_decode, shared: {label}", together, *dense)
    checks.equal(f"paged_decode, shared on and off: {label}", apart, together)
    k_cache, v_cache, table, lens = rows.paged()
    alone = [
        paged_decode(q[i : i + 1], k_cache, v_cache, table[i : i + 1], lens[i : i + 1], **options)
        for i in range(len(q))
    ]
    checks.equal(f"paged_decode, rows alone and together: {label}", apart, torch.cat(alone))


def _prefill(
    checks: Checks, label: str, q: Tensor, rows: Contexts, counts: list[int], options: Options
) -> None:
    k_cache, v_cache, table, lens = rows.paged()
    starts = torch.tensor([0, *counts], device=q.device).cumsum(0).int()
    out = paged_prefill(q, k_cache, v_cache, table, starts, lens, **options)
    checks.exact(f"paged_prefill: {label}", out, *_dense(q.split(counts), rows, options))
    # Each query once more, as a row that decodes at its place.
    row_of = [row for row, count in enumerate(counts) for _ in range(count)]
    spans = zip(lens.tolist(), counts, strict=True)
    at = [length - count + 1 + i for length, count in spans for i in range(count)]
    places = torch.tensor(at, dtype=torch.int32, device=q.device)
    decoded = paged_decode(q, k_cache, v_cache, table[row_of], places, **options)
    checks.equal(f"paged_prefill and paged_decode: {label}", out, decoded)


def _dense(parts: Sequence[Tensor], rows: Contexts, options: Options) -> tuple[Tensor, Tensor]:
    """Of each row's queries: as torch has it in their dtype, and in float64."""

    def attended(device: torch.device, dtype: torch.dtype) -> Tensor:
        def cast(x: Any) -> Any:
            return x.to(device, dtype) if isinstance(x, Tensor) else x

        given = {name: cast(value) for name, value in options.items()}
        each = zip(parts, rows.keys, rows.values, strict=True)
        return torch.cat([attend(cast(q), cast(k), cast(v), **given) for q, k, v in each])

    q = parts[0]
    return attended(q.device, q.dtype), attended(q.device, torch.float64)
