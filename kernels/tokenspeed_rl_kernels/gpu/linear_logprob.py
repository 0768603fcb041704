"""`linear_logprob` on a GPU: logits live in registers forwards, and a part of them in memory backwards.

Forwards a program takes a block of tokens and a split of the vocabulary of constant size, tile by tile; a
second kernel merges each token's splits, all at once. Backwards the same tiles, so the same logits, become
their gradients of a part of the vocabulary, and torch multiplies these. Programs that are neighbours in time
share a split of the weight: it is read from memory once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_rl_kernels.gpu.kernel import TYPES, Build, Spec, cdiv, next_power_of_2
from tokenspeed_rl_kernels.gpu.logits_tile import Head, load_target, logits_tile, tile_build
from tokenspeed_rl_kernels.vocab_parts import gradients

SPLIT = 1024
"""Logits of a token that a program sums up."""
ELEMENTS = 2**26
"""Gradients of logits that exist at a time."""


@triton.jit(do_not_specialize=["tokens"])
def splits_kernel(
    hidden,
    weight,
    bias,
    targets,
    states,
    chosen,
    tokens,
    vocab,
    width,
    hidden_stride,
    weight_stride,
    scale,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """states [3, tokens, splits]: top = largest z, sum of p = exp(z - top), sum of p (z - top).

    chosen [tokens]: z of the targets. Grid (blocks of tokens, splits): the first runs fastest.
    """
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    target = load_target(targets, token, tokens, vocab)
    first = tl.program_id(1) * SPLIT
    last = tl.minimum(first + SPLIT, vocab)
    top = tl.full([BLOCK_M], -3.0e38, tl.float32)  # finite: below, a difference of it and itself is 0
    mass = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M], tl.float32)
    found = tl.zeros([BLOCK_M], tl.float32)
    for start in range(first, last, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        z = logits_tile(
            hidden,
            hidden_stride,
            token,
            tokens,
            weight,
            weight_stride,
            bias,
            column,
            vocab,
            width,
            scale,
            BIAS,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        found += tl.sum(tl.where(column[None, :] == target[:, None], z, 0.0), 1)
        before = top
        top = tl.maximum(top, tl.max(z, 1))
        fall = before - top
        z -= top[:, None]
        p = tl.exp(z)
        weighted = tl.exp(fall) * (weighted + fall * mass) + tl.sum(p * tl.where(p > 0, z, 0.0), 1)
        mass = tl.exp(fall) * mass + tl.sum(p, 1)
    inside = token < tokens
    token = token.to(tl.int64)
    splits = tl.num_programs(1)
    at = states + token * splits + tl.program_id(1)
    size = tokens.to(tl.int64) * splits
    tl.store(at, top, inside)
    tl.store(at + size, mass, inside)
    tl.store(at + 2 * size, weighted, inside)
    tl.store(chosen + token, found, inside & (target >= first) & (target < last))


@triton.jit(do_not_specialize=["tokens"])
def merge_kernel(
    states, chosen, targets, logprob, entropy, normaliser, tokens, vocab, splits, BLOCK: tl.constexpr
):
    """Results, and normaliser [2, tokens]; grid (tokens)."""
    token = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK)
    inside = split < splits
    at = states + token * splits + split
    size = tokens.to(tl.int64) * splits
    tops = tl.load(at, inside, -3.0e38)
    masses = tl.load(at + size, inside, 0.0)
    weighted = tl.load(at + 2 * size, inside, 0.0)
    top = tl.max(tops, 0)
    fall = tops - top
    mass = tl.sum(tl.exp(fall) * masses, 0)
    mean = tl.sum(tl.exp(fall) * (weighted + fall * masses), 0) / mass
    log_mass = tl.log(mass)
    target = tl.load(targets + token)
    known = (target >= 0) & (target < vocab)
    z = tl.load(chosen + token, known, float("nan"))
    tl.store(logprob + token, z - top - log_mass)
    tl.store(entropy + token, log_mass - mean)
    tl.store(normaliser + token, top)
    tl.store(normaliser + tokens + token, log_mass)


@triton.jit(do_not_specialize=["tokens"])
def slopes_kernel(
    hidden,
    weight,
    bias,
    targets,
    rows,
    slopes,
    tokens,
    vocab,
    width,
    hidden_stride,
    weight_stride,
    first,
    last,
    scale,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """slopes [tokens, last - first]: gradients of the logits from `first` on; rows [5, tokens] as of the op.

    Grid (blocks of tokens, blocks of the part).
    """
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = token < tokens
    column = first + tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    z = logits_tile(
        hidden,
        hidden_stride,
        token,
        tokens,
        weight,
        weight_stride,
        bias,
        column,
        vocab,
        width,
        scale,
        BIAS,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    target = load_target(targets, token, tokens, vocab)
    at = rows + token
    top = tl.load(at, inside, 0.0)
    log_mass = tl.load(at + tokens, inside, 0.0)
    grad_logprob = tl.load(at + 2 * tokens, inside, 0.0)
    grad_entropy = tl.load(at + 3 * tokens, inside, 0.0)
    base = tl.load(at + 4 * tokens, inside, 0.0)
    z = z - top[:, None] - log_mass[:, None]
    p = tl.exp(z)
    slope = -p * (base[:, None] + grad_entropy[:, None] * tl.where(p > 0, z, 0.0))
    slope += tl.where(column[None, :] == target[:, None], grad_logprob[:, None], 0.0)
    out = slopes + token.to(tl.int64)[:, None] * (last - first) + (column - first)[None, :]
    tl.store(out, (slope * scale).to(slopes.dtype.element_ty), inside[:, None] & (column < last)[None, :])


def merge_build(vocab: int) -> Build:
    """How the merge is compiled."""
    return Build(constants={"BLOCK": next_power_of_2(cdiv(vocab, SPLIT))}, num_stages=1)


def forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `linear_logprob_forward`."""
    head = Head.of(hidden, weight, bias, targets)
    tokens, vocab = len(hidden), len(weight)
    splits = cdiv(vocab, SPLIT)
    states = hidden.new_empty(3, tokens, splits, dtype=torch.float32)
    chosen, logprob, entropy = (hidden.new_empty(tokens, dtype=torch.float32) for _ in range(3))
    normaliser = hidden.new_empty(2, tokens, dtype=torch.float32)
    build = tile_build(hidden.dtype, bias is not None, SPLIT=SPLIT)
    grid = cdiv(tokens, build.constants["BLOCK_M"]), splits
    build.run(splits_kernel, grid, *head, states, chosen, *head.sizes, 1 / temperature)
    results = logprob, entropy, normaliser
    merge_build(vocab).run(
        merge_kernel, (tokens,), states, chosen, head.targets, *results, tokens, vocab, splits
    )
    return results


def backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    rows: Tensor,
    temperature: float,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """See `linear_logprob_backward`."""
    head, rows = Head.of(hidden, weight, bias, targets), rows.contiguous()
    build = tile_build(hidden.dtype, bias is not None)
    tokens = len(hidden)

    def slopes(part: slice) -> Tensor:
        out = hidden.new_empty(tokens, part.stop - part.start)
        grid = cdiv(tokens, build.constants["BLOCK_M"]), cdiv(out.shape[1], build.constants["BLOCK_N"])
        bounds = part.start, part.stop
        build.run(slopes_kernel, grid, *head, rows, out, *head.sizes, *bounds, 1 / temperature)
        return out

    return gradients(hidden, weight, slopes, ELEMENTS, wanted)


def _specs(name: str, dtype: torch.dtype, bias: bool) -> tuple[Spec, Spec]:
    """Both kernels that compute logits."""
    head = dict.fromkeys(("hidden", "weight", "bias"), f"*{TYPES[dtype]}") | {"targets": "*i64"}
    sizes = dict.fromkeys(("tokens", "vocab", "width", "hidden_stride", "weight_stride"), "i32")
    aligned = (*head, "vocab", "width", "hidden_stride", "weight_stride")
    half = dtype != torch.float32
    states = dict.fromkeys(("states", "chosen"), "*fp32")
    slopes = {"rows": "*fp32", "slopes": f"*{TYPES[dtype]}"}
    bounds = dict.fromkeys(("first", "last"), "i32")
    return (
        Spec(
            name=f"linear_logprob splits {name} {TYPES[dtype]}",
            kernel=splits_kernel,
            types=head | states | sizes | {"scale": "fp32"},
            aligned=(*aligned, *states),
            build=tile_build(dtype, bias, SPLIT=SPLIT),
            wants_mma=half,
            may_wgmma=True,
            wants_async=True,
        ),
        Spec(
            name=f"linear_logprob slopes {name} {TYPES[dtype]}",
            kernel=slopes_kernel,
            types=head | slopes | sizes | bounds | {"scale": "fp32"},
            aligned=(*aligned, *slopes, *bounds),
            build=tile_build(dtype, bias),
            wants_mma=half,
            may_wgmma=True,
            wants_async=True,
        ),
    )


SPECS = (
    *_specs("head", torch.bfloat16, False),
    *_specs("head, bias", torch.bfloat16, True),
    *_specs("head", torch.float32, False),
    Spec(
        name="linear_logprob merge 151936",
        kernel=merge_kernel,
        types=dict.fromkeys(("states", "chosen"), "*fp32")
        | {"targets": "*i64"}
        | dict.fromkeys(("logprob", "entropy", "normaliser"), "*fp32")
        | dict.fromkeys(("tokens", "vocab", "splits"), "i32"),
        aligned=("states", "chosen", "targets", "logprob", "entropy", "normaliser", "vocab"),
        build=merge_build(151936),
    ),
)
