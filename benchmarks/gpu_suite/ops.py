"""Each op at the shapes of a decode step, against plain torch, as a share of the measured bandwidth."""

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from roofline import Shape, context_tokens

from gpu_suite.machine import Act, Machine
from gpu_suite.models import shapes
from gpu_suite.paged import contexts
from tokenspeed_rl_kernels import (
    add_rms_norm,
    linear,
    paged_decode,
    paged_prefill,
    rope_write_kv,
    sample,
    silu_mul,
)

GROUP = 8
"""Samples of a prompt."""


@dataclass(slots=True, kw_only=True)
class Case:
    """One op, and torch's way to the same."""

    op: str
    nbytes: int
    """Read and written once each."""
    ours: Act
    torchs: Act


Make = Callable[[Machine, Shape, int, int], Iterator[Case]]


def run(machine: Machine, found: dict[str, Any]) -> None:
    """For each shape and number of rows; what the time doesn't allow is left out, and said."""
    batches, context = ((1, 8), 64) if machine.dry else ((1, 64, 256), 2048)
    found |= {"ops": [], "left_out": [], "raised": {}, "headlines": []}
    for name, shape in shapes(machine).items():
        for rows in batches:
            for make in MAKERS:
                what = f"{name}, {rows} rows: {make.__name__}"
                if machine.left < 2:
                    found["left_out"].append(what)
                    continue
                try:
                    for case in make(machine, shape, rows, context):
                        line = {"model": name, "rows": rows, **timed(machine, case)}
                        found["ops"].append(line)
                        found["headlines"].append(headline(line))
                except Exception:
                    found["raised"][what] = traceback.format_exc()
    if found["raised"]:
        raise RuntimeError(f"raised: {', '.join(found['raised'])}")


def timed(machine: Machine, case: Case) -> dict[str, Any]:
    """Both in turn."""
    seconds = machine.race({"ours": case.ours, "torch": case.torchs}, rounds=3 if machine.dry else 15)
    rate = case.nbytes / seconds["ours"]
    return {
        "op": case.op,
        "seconds": seconds["ours"],
        "torch_seconds": seconds["torch"],
        "bytes": case.nbytes,
        "bytes_per_second": rate,
        "of_bandwidth": rate / machine.bandwidth,
    }


def headline(line: dict[str, Any]) -> str:
    """One line of the final table."""
    return (
        f"{line['model']}, {line['rows']:3} rows, {line['op']}: {line['seconds'] * 1e6:.1f} us, "
        f"{line['bytes_per_second'] / 1e9:.0f} GB/s, {line['of_bandwidth']:.0%} of the bandwidth, "
        f"torch {line['torch_seconds'] / line['seconds']:.2f}x"
    )


def attention(machine: Machine, shape: Shape, rows: int, context: int) -> Iterator[Case]:
    """Decode over separate contexts and over those of samples of one prompt; torch's lie side by side."""
    heads, dim = shape.heads, shape.head_dim
    q = machine.random(rows, heads, dim)
    token = 2 * shape.kv_heads * dim * q.itemsize
    for name, prefix in (("paged_decode", 0), (f"paged_decode, {GROUP} share", context // 2)):
        if prefix and rows < GROUP:
            continue
        paged = contexts([context] * rows, kv_heads=shape.kv_heads, dim=dim, device=machine.device)
        shared = share(paged.table, prefix // 16) if prefix else None
        keys, values = (torch.stack(x).transpose(1, 2) for x in (paged.keys, paged.values))
        nbytes = context_tokens(rows, context, prefix, GROUP) * token + 2 * q.nbytes
        yield Case(
            op=name,
            nbytes=nbytes,
            ours=lambda paged=paged, shared=shared: paged_decode(q, *paged.paged(), shared=shared),
            torchs=lambda keys=keys, values=values: F.scaled_dot_product_attention(
                q.unsqueeze(2), keys, values, enable_gqa=True
            ),
        )


def share(table: torch.Tensor, pages: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Let each group of rows begin with the first one's pages: written to the table."""
    first = table[::GROUP, :pages].clone()
    group = torch.arange(len(table), device=table.device) // GROUP
    table[:, :pages] = first[group]
    lens = torch.full((len(first),), pages * 16, dtype=torch.int32, device=table.device)
    return first, lens, group.int()


def prefill(machine: Machine, shape: Shape, rows: int, context: int) -> Iterator[Case]:
    """One whole prompt, once."""
    if rows > 1:
        return
    paged = contexts([context], kv_heads=shape.kv_heads, dim=shape.head_dim, device=machine.device)
    q = machine.random(context, shape.heads, shape.head_dim)
    starts = torch.tensor([0, context], dtype=torch.int32, device=machine.device)
    dense = [x[0].transpose(0, 1).unsqueeze(0) for x in (q.unsqueeze(0), paged.keys, paged.values)]
    k_cache, v_cache, table, lens = paged.paged()
    yield Case(
        op=f"paged_prefill of {context}",
        nbytes=2 * q.nbytes + 2 * paged.keys[0].nbytes,
        ours=lambda: paged_prefill(q, k_cache, v_cache, table, starts, lens),
        torchs=lambda: F.scaled_dot_product_attention(*dense, is_causal=True, enable_gqa=True),
    )


def small(machine: Machine, shape: Shape, rows: int, context: int) -> Iterator[Case]:
    """Norm, rotation and gate."""
    x, residual = machine.random(rows, shape.hidden), machine.random(rows, shape.hidden, seed=2)
    weight = machine.random(shape.hidden, seed=3)
    yield Case(
        op="add_rms_norm",
        nbytes=4 * x.nbytes,
        ours=lambda: add_rms_norm(x, residual, weight, 1e-6),
        torchs=lambda: F.rms_norm(x + residual, weight.shape, weight, 1e-6),
    )
    gates = machine.random(rows, 2 * shape.intermediate)
    yield Case(
        op="silu_mul",
        nbytes=gates.nbytes * 3 // 2,
        ours=lambda: silu_mul(gates),
        torchs=lambda: F.silu(gates[:, : shape.intermediate]) * gates[:, shape.intermediate :],
    )
    yield rotation(machine, shape, rows, context)


def rotation(machine: Machine, shape: Shape, rows: int, context: int) -> Case:
    """A new token of each row."""
    qkv = machine.random(rows, shape.heads + 2 * shape.kv_heads, shape.head_dim)
    q, k, v = qkv.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
    caches = [torch.zeros(rows, shape.kv_heads, 16, shape.head_dim).to(qkv) for _ in range(2)]
    cos_sin = torch.rand(context, shape.head_dim, device=machine.device)
    at = torch.full((rows,), context - 1, device=machine.device)
    slots = torch.arange(rows, device=machine.device) * 16

    def by_torch() -> torch.Tensor:
        cos, sin = cos_sin[at].to(q.dtype).unsqueeze(1).repeat(1, 1, 2).chunk(2, 2)

        def rotated(x: torch.Tensor) -> torch.Tensor:
            a, b = x.chunk(2, 2)
            return x * cos + torch.cat((-b, a), 2) * sin

        for cache, new in zip(caches, (rotated(k), v), strict=True):
            cache[slots // 16, :, slots % 16] = new
        return rotated(q)

    return Case(
        op="rope_write_kv",
        nbytes=2 * qkv.nbytes,
        ours=lambda: rope_write_kv(q, k, v, at, cos_sin, caches[0], caches[1], slots),
        torchs=by_torch,
    )


def products(machine: Machine, shape: Shape, rows: int, context: int) -> Iterator[Case]:
    """A layer's four and the head's."""
    attended = shape.heads * shape.head_dim
    sizes = {
        "qkv": (shape.qkv, shape.hidden),
        "o": (shape.hidden, attended),
        "gate_up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
        "head": (shape.vocab, shape.hidden),
    }
    for name, (outputs, inputs) in sizes.items():
        x, weight = machine.random(rows, inputs), machine.blank(outputs, inputs)
        nbytes = weight.nbytes + x.nbytes + rows * outputs * x.itemsize
        for invariant in (False, True):
            yield Case(
                op=f"linear {name}{', invariant' * invariant}",
                nbytes=nbytes,
                ours=lambda x=x, weight=weight, i=invariant: linear(x, weight, invariant=i),
                torchs=lambda x=x, weight=weight: F.linear(x, weight),
            )


def head(machine: Machine, shape: Shape, rows: int, context: int) -> Iterator[Case]:
    """The draw, with a temperature alone and with top-p; torch's is without filter and logprobs."""
    logits = machine.blank(rows, shape.vocab).float()
    ones, zeros = (make(rows, device=machine.device) for make in (torch.ones, torch.zeros))
    seeds = torch.arange(rows, device=machine.device)
    heat, no_k = ones * 0.8, zeros.long()
    noise = torch.ones_like(logits)  # drawing it is not timed
    for name, top_p in (("sample", ones), ("sample, top-p", ones * 0.9)):
        yield Case(
            op=name,
            nbytes=logits.nbytes,
            ours=lambda top_p=top_p: sample(logits, heat, no_k, top_p, zeros, seeds, seeds),
            torchs=lambda: ((logits / 0.8).softmax(1) / noise).argmax(1),
        )


MAKERS: tuple[Make, ...] = (attention, prefill, small, products, head)
