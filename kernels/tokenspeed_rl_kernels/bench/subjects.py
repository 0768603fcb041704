"""What is timed: for each op its call and plain torch's on the same inputs, and what both move and compute.

A new op joins by one more `subject`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tokenspeed_rl_kernels as ops
from tokenspeed_rl_kernels.bench import plain
from tokenspeed_rl_kernels.decode_work import DecodeWork, Sharing, max_splits

PAGE = 16
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a model's config says of its shapes."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    intermediate: int
    vocab: int


SMOLLM2 = Model(name="smollm2", hidden=576, heads=9, kv_heads=3, dim=64, intermediate=1536, vocab=49152)
QWEN_HALF = Model(name="qwen 0.5B", hidden=896, heads=14, kv_heads=2, dim=64, intermediate=4864, vocab=151936)
QWEN = Model(name="qwen 1.5B", hidden=1536, heads=12, kv_heads=2, dim=128, intermediate=8960, vocab=151936)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where and how large."""

    device: torch.device
    dtype: torch.dtype
    models: tuple[Model, ...]
    rows: tuple[int, ...]
    context: int
    generator: torch.Generator

    def shapes(self) -> Iterator[tuple[Model, int]]:
        """Every model with every number of rows."""
        return ((model, rows) for model in self.models for rows in self.rows)

    def random(self, *shape: int) -> Tensor:
        """Normal numbers."""
        return torch.randn(shape, generator=self.generator, device=self.device).to(self.dtype)

    def below(self, high: int, *shape: int) -> Tensor:
        """Integers from 0 to high - 1."""
        return torch.randint(high, shape, generator=self.generator, device=self.device)

    def order(self, n: int) -> Tensor:
        """0 to n - 1, shuffled."""
        return torch.randperm(n, generator=self.generator, device=self.device)


def setting(device: torch.device, dtype: torch.dtype) -> Setting:
    """What is decoded in earnest on such a device."""
    on_cpu = device.type == "cpu"
    return Setting(
        device=device,
        dtype=dtype,
        models=(SMOLLM2,) if on_cpu else (QWEN_HALF, QWEN),
        rows=(1, 8, 64) if on_cpu else (1, 64, 256),
        context=512 if on_cpu else 2048,
        generator=torch.Generator(device).manual_seed(0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One line of the table."""

    name: str
    ours: Callable[[], object]
    torchs: Callable[[], object]
    tensors: tuple[Tensor, ...] = field(repr=False)
    """Read or written, once each."""
    flops: int = 0

    @property
    def bytes(self) -> int:
        """Moved at the least."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


SUBJECTS: dict[str, Callable[[Setting], Iterator[Subject]]] = {}
"""By op."""


def subject(make: Callable[[Setting], Iterator[Subject]]) -> Callable[[Setting], Iterator[Subject]]:
    """Register what yields the subjects of the op that it is named for."""
    SUBJECTS[make.__name__] = make
    return make


@subject
def silu_mul(s: Setting) -> Iterator[Subject]:
    """The gate."""
    for model, rows in s.shapes():
        x = s.random(rows, 2 * model.intermediate)
        gate, value = x.chunk(2, 1)
        yield Subject(
            name=f"{model.name}, {rows} rows",
            ours=partial(ops.silu_mul, x),
            torchs=partial(plain.silu_mul, gate, value),
            tensors=(x, gate),
        )


@subject
def add_rms_norm(s: Setting) -> Iterator[Subject]:
    """With a residual."""
    for model, rows in s.shapes():
        x, residual = s.random(rows, model.hidden), s.random(rows, model.hidden)
        weight = s.random(model.hidden)
        yield Subject(
            name=f"{model.name}, {rows} rows",
            ours=partial(ops.add_rms_norm, x, residual, weight, 1e-6),
            torchs=partial(plain.add_rms_norm, x, residual, weight),
            tensors=(x, residual, x, residual, weight),
        )


@subject
def linear(s: Setting) -> Iterator[Subject]:
    """Up and down projections."""
    for model, rows in s.shapes():
        up, down = (model.hidden, 2 * model.intermediate), (model.intermediate, model.hidden)
        for inputs, outputs in (up, down):
            x, weight = s.random(rows, inputs), s.random(outputs, inputs)
            yield Subject(
                name=f"{model.name}, {rows} rows, {inputs} to {outputs}",
                ours=partial(ops.linear, x, weight),
                torchs=partial(F.linear, x, weight),
                tensors=(x, weight, x.new_empty(rows, outputs)),
                flops=2 * rows * inputs * outputs,
            )


@subject
def rope_write_kv(s: Setting) -> Iterator[Subject]:
    """Views of one projection, rotated and written."""
    for model, rows in s.shapes():
        kv_heads, dim = model.kv_heads, model.dim
        qkv = s.random(rows, model.heads + 2 * kv_heads, dim)
        pages = rows * s.context // PAGE
        caches = [s.random(pages, kv_heads, PAGE, dim) for _ in range(2)]
        slots, positions = s.order(pages * PAGE)[:rows], s.below(s.context, rows)
        cos_sin = torch.randn(s.context, dim, generator=s.generator, device=s.device)
        arguments = *qkv.split((model.heads, kv_heads, kv_heads), 1), positions, cos_sin, *caches, slots
        yield Subject(
            name=f"{model.name}, {rows} tokens",
            ours=partial(ops.rope_write_kv, *arguments),
            torchs=partial(plain.rope_write_kv, *arguments),
            tensors=(qkv, qkv, cos_sin[:rows]),
        )


def _paged(s: Setting, model: Model, rows: int) -> tuple[Pair, Pair, Tensor, Tensor]:
    """Keys and values, dense [B, Hkv, n, D] and in shuffled pages; page table and lengths."""
    keys, values = (s.random(rows, model.kv_heads, s.context, model.dim) for _ in range(2))
    table = s.order(rows * s.context // PAGE).view(rows, -1)

    def paged(x: Tensor) -> Tensor:
        pages = x.unflatten(2, (-1, PAGE)).transpose(1, 2).flatten(0, 1)
        shuffled: Tensor = pages.new_empty(pages.shape).index_copy_(0, table.flatten(), pages)
        return shuffled

    lens = torch.full((rows,), s.context, dtype=torch.int32, device=s.device)
    return (keys, values), (paged(keys), paged(values)), table.int(), lens


@subject
def paged_decode(s: Setting) -> Iterator[Subject]:
    """One query per row."""
    for model, rows in s.shapes():
        dense, caches, table, lens = _paged(s, model, rows)
        q = s.random(rows, model.heads, model.dim)
        yield Subject(
            name=f"{model.name}, {rows} rows, {s.context} context",
            ours=partial(ops.paged_decode, q, *caches, table, lens),
            torchs=partial(plain.decode, q, *dense),
            tensors=(q, q, *dense),
            flops=4 * q.numel() * s.context,
        )


@subject
def paged_prefill(s: Setting) -> Iterator[Subject]:
    """One prompt."""
    for model in s.models:
        dense, caches, table, lens = _paged(s, model, 1)
        q = s.random(s.context, model.heads, model.dim)
        yield Subject(
            name=f"{model.name}, {s.context} tokens",
            ours=partial(ops.paged_prefill, q, *caches, table, F.pad(lens, (1, 0)), lens),
            torchs=partial(plain.prefill, q, *dense),
            tensors=(q, q, *dense),
            flops=2 * q.numel() * s.context,
        )


@subject
def sample(s: Setting) -> Iterator[Subject]:
    """From all tokens and from a nucleus; torch gives one logprob, we three."""
    for model, rows in s.shapes():
        logits = s.random(rows, model.vocab).float()
        for top_p in (1.0, 0.9):
            columns = [torch.full((rows,), x, device=s.device) for x in (0.8, 0, top_p, 0.0)]
            columns += [s.below(2**40, rows), s.below(s.context, rows)]
            yield Subject(
                name=f"{model.name}, {rows} rows, top-p {top_p}",
                ours=partial(ops.sample, logits, *columns),
                torchs=partial(plain.sample, logits, 0.8, top_p),
                tensors=(logits,),
            )


@subject
def linear_logprob(s: Setting) -> Iterator[Subject]:
    """Logprobs and entropies; torch makes the logits."""
    for model, rows in s.shapes():
        hidden, weight = s.random(rows, model.hidden), s.random(model.vocab, model.hidden)
        targets = s.below(model.vocab, rows)
        yield Subject(
            name=f"{model.name}, {rows} rows",
            ours=partial(ops.linear_logprob, hidden, weight, targets),
            torchs=partial(plain.linear_logprob, hidden, weight, targets),
            tensors=(hidden, weight),
            flops=2 * rows * weight.numel(),
        )


@subject
def step_metadata(s: Setting) -> Iterator[Subject]:
    """Positions, slots and attention's work; torch makes the first two."""
    for rows in s.rows:
        table = s.order(rows * s.context // PAGE).view(rows, -1).int()
        lens = torch.full((rows,), s.context, dtype=torch.int32, device=s.device)
        places = torch.zeros(2, rows, dtype=torch.int64, device=s.device)
        work = DecodeWork.empty(Sharing.none(rows, s.device), max_splits(table.shape[1], PAGE))
        arguments = lens, table, work, *places

        def ours(arguments: Any = arguments, places: Tensor = places) -> Tensor:
            ops.step_metadata(*arguments, page_size=PAGE, advance=False)
            return places

        yield Subject(
            name=f"{rows} rows, {s.context} context",
            ours=ours,
            torchs=partial(plain.step_metadata, lens, table, PAGE),
            tensors=(lens, table[:, 0], places, work.items),
        )
