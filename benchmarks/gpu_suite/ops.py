"""Each op against plain torch, at the shapes that the kernels' own bench has and some more, as a share of the
measured bandwidth; out of graphs, as a step runs them."""

import traceback
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from roofline import context_tokens

from gpu_suite.machine import Machine
from tokenspeed_rl_kernels import linear, paged_decode
from tokenspeed_rl_kernels.bench import plain
from tokenspeed_rl_kernels.bench.subjects import SUBJECTS, Model, Setting, Subject, setting

GROUP = 8
"""Samples of a prompt."""
PAGE = 16
TOY = Model(name="toy", hidden=64, heads=4, kv_heads=2, dim=16, intermediate=96, vocab=256)


def run(machine: Machine, found: dict[str, Any]) -> None:
    """All of them; what the time doesn't allow is left out, and said."""
    found |= {"ops": [], "left_out": [], "raised": {}, "headlines": []}
    place = setting(machine.device, torch.bfloat16)
    if machine.dry:
        toys = {"models": (TOY,), "rows": (1, 8), "context": 64}
        place = Setting(device=machine.device, dtype=torch.bfloat16, generator=place.generator, **toys)
    for op, make in (SUBJECTS | MORE).items():
        try:
            for subject in make(place):
                if machine.left < 2:
                    found["left_out"].append(f"{op}: {subject.name}")
                    break
                line = timed(machine, op, subject)
                found["ops"].append(line)
                found["headlines"].append(headline(line))
        except Exception:
            found["raised"][op] = traceback.format_exc()
    if found["raised"]:
        raise RuntimeError(f"raised: {', '.join(found['raised'])}")


def timed(machine: Machine, op: str, subject: Subject) -> dict[str, Any]:
    """Both in turn."""
    calls = {"ours": subject.ours, "torch": subject.torchs}
    seconds = machine.race(calls, rounds=3 if machine.dry else 15)
    rate = subject.bytes / seconds["ours"]
    return {
        "op": op,
        "subject": subject.name,
        "seconds": seconds["ours"],
        "torch_seconds": seconds["torch"],
        "bytes": subject.bytes,
        "flops": subject.flops,
        "bytes_per_second": rate,
        "of_bandwidth": rate / machine.bandwidth,
    }


def headline(line: dict[str, Any]) -> str:
    """One line of the final table."""
    return (
        f"{line['op']}, {line['subject']}: {line['seconds'] * 1e6:.1f} us, "
        f"{line['bytes_per_second'] / 1e9:.0f} GB/s, {line['of_bandwidth']:.0%} of the bandwidth, "
        f"torch {line['torch_seconds'] / line['seconds']:.2f}x"
    )


def shared_decode(place: Setting) -> Iterator[Subject]:
    """Samples of a prompt that is half of each context; torch reads each row's own."""
    for model, rows in place.shapes():
        if rows < GROUP:
            continue
        length, prompt = place.context, place.context // 2
        q = place.random(rows, model.heads, model.dim)
        caches = [place.random(rows * length // PAGE, model.kv_heads, PAGE, model.dim) for _ in range(2)]
        table = place.order(rows * length // PAGE).view(rows, -1).int()
        first = table[::GROUP, : prompt // PAGE].clone()
        group = torch.arange(rows, device=place.device) // GROUP
        table[:, : prompt // PAGE] = first[group]
        lens = torch.full((rows,), length, dtype=torch.int32, device=place.device)
        shared = first, torch.full_like(lens[::GROUP], prompt), group.int()
        dense = [cache.view(rows, -1, model.kv_heads, PAGE, model.dim) for cache in caches]
        dense = [x.transpose(2, 1).flatten(2, 3) for x in dense]  # as much as torch would read
        read = context_tokens(rows, length, prompt, GROUP) * model.kv_heads * model.dim
        yield Subject(
            name=f"{model.name}, {rows} rows, {GROUP} share {prompt} of {length}",
            ours=partial(paged_decode, q, *caches, table, lens, shared=shared),
            torchs=partial(plain.decode, q, *dense),
            tensors=(q, q, *(cache.flatten()[:read] for cache in caches)),
            flops=4 * q.numel() * length,
        )


def other_linears(place: Setting) -> Iterator[Subject]:
    """Those of a step that the bench leaves out, and all five in invariant mode."""
    for model, rows in place.shapes():
        attended = model.heads * model.dim
        sizes = {
            "qkv": (model.hidden, attended + 2 * model.kv_heads * model.dim),
            "o": (attended, model.hidden),
            "gate_up": (model.hidden, 2 * model.intermediate),
            "down": (model.intermediate, model.hidden),
            "head": (model.hidden, model.vocab),
        }
        for name, (inputs, outputs) in sizes.items():
            x, weight = place.random(rows, inputs), place.random(outputs, inputs)
            for invariant in (True,) if name in ("gate_up", "down") else (False, True):
                yield Subject(
                    name=f"{model.name}, {rows} rows, {name}{', invariant' * invariant}",
                    ours=partial(linear, x, weight, invariant=invariant),
                    torchs=partial(F.linear, x, weight),
                    tensors=(x, weight, x.new_empty(rows, outputs)),
                    flops=2 * rows * inputs * outputs,
                )


MORE = {"paged_decode, shared": shared_decode, "linear, others": other_linears}
