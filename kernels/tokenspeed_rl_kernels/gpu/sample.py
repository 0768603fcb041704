"""`sample` in four launches: blocks of tokens summed up, filters as a floor, blocks of what stays, the draw.

Sums of exponentials are stored as logarithms, relative to the block's or the row's largest logit.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_rl_kernels.checks import misfit
from tokenspeed_rl_kernels.gpu.filters import LAST_ID, floors_kernel, heat_of, rank_of, scale
from tokenspeed_rl_kernels.gpu.gumbel import gumbel, row_key, substream
from tokenspeed_rl_kernels.gpu.kernel import Build, Spec, cdiv, next_power_of_2
from tokenspeed_rl_kernels.sample import BLOCK

GROUP = 16
"""Blocks per program where programs share a row."""
CHUNK = 2048
"""Tokens that a program looks at at once where it has a row to itself."""
CAPACITY = 8192
"""Tokens of a row that are put aside for its filters."""


@triton.jit
def blocks_kernel(
    logits,
    temperature,
    blocks,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """blocks [B, 0]: the largest logit of each block; [B, 1]: log-sum-exp less that; [B, 2]: of logits / T.

    Of logits [B, VOCAB]; blocks [B, 4, BLOCKS] fp32; grid (B, groups of blocks).
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + row * STRIDE + ids, ids < VOCAB, float("-inf"))
    largest = tl.max(x, 1)
    centred = x - tl.where(largest == float("-inf"), 0.0, largest)[:, None]
    heat = heat_of(tl.load(temperature + row))
    out = blocks + row * 4 * BLOCKS + block
    tl.store(out, largest, block < BLOCKS)
    tl.store(out + BLOCKS, tl.log(tl.sum(tl.exp(centred), 1)), block < BLOCKS)
    tl.store(out + 2 * BLOCKS, tl.log(tl.sum(tl.exp(centred / heat), 1)), block < BLOCKS)


@triton.jit
def kept_kernel(
    logits,
    temperature,
    peaks,
    floors,
    blocks,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """blocks [B, 3]: log-sum-exp of the scaled logits that stay of each block, less the row's largest.

    Written for rows of which not everything stays; grid as above.
    """
    row = tl.program_id(0).to(tl.int64)
    floor = tl.load(floors + row)
    if floor > 0:
        block = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
        heat, peak = heat_of(tl.load(temperature + row)), tl.load(peaks + row)
        out = blocks + row * 4 * BLOCKS + block
        highest = scale(tl.load(out, block < BLOCKS, float("-inf")), peak, heat)
        some = rank_of(highest, block * BLOCK) >= floor  # of it stay; others aren't read
        ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        x = tl.load(logits + row * STRIDE + ids, some[:, None] & (ids < VOCAB), float("-inf"))
        value = scale(x, peak, heat)
        value = tl.where(rank_of(value, ids) >= floor, value, float("-inf"))
        largest = tl.max(value, 1)
        centred = value - tl.where(largest == float("-inf"), 0.0, largest)[:, None]
        logsum = tl.log(tl.sum(tl.exp(centred), 1))
        tl.store(out + 3 * BLOCKS, largest - scale(peak, peak, heat) + logsum, block < BLOCKS)


@triton.jit
def _argmax(scores):
    """The first largest of [N]; NaN, of which nothing will be made, isn't compared."""
    return tl.argmax(tl.where(scores == scores, scores, float("-inf")), 0)


@triton.jit
def draw_kernel(
    logits,
    temperature,
    seeds,
    positions,
    peaks,
    floors,
    blocks,
    tokens,
    logprob_raw,
    logprob_sampling,
    logprob_processed,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """tokens [B] int64 and their logprobs [B] fp32; TILE >= BLOCKS is a power of 2; grid (B,)."""
    row = tl.program_id(0).to(tl.int64)
    temperature, floor, peak = tl.load(temperature + row), tl.load(floors + row), tl.load(peaks + row)
    heat = heat_of(temperature)
    greedy = temperature == 0.0
    summit = scale(peak, peak, heat)
    logits += row * STRIDE
    blocks += row * 4 * BLOCKS

    block = tl.arange(0, TILE)
    real = block < BLOCKS
    largest = tl.load(blocks + block, real, float("-inf"))
    raw = largest - peak + tl.load(blocks + BLOCKS + block, real, float("-inf"))
    logsum = tl.load(blocks + 2 * BLOCKS + block, real, float("-inf"))
    sampling = scale(largest, peak, heat) - summit + logsum
    processed = sampling
    if floor > 0:
        processed = tl.load(blocks + 3 * BLOCKS + block, real, float("-inf"))

    key = row_key(tl.load(seeds + row), tl.load(positions + row))
    drawn = _argmax(processed.to(tl.float64) + gumbel(substream(key, 1), block))
    first = tl.where(greedy, _argmax(largest), drawn) * BLOCK
    ids = first + tl.arange(0, BLOCK)
    x = tl.load(logits + ids, ids < VOCAB, float("-inf"))
    value = scale(x, peak, heat)
    value = tl.where(rank_of(value, ids) >= floor, value, float("-inf"))
    drawn = _argmax(value.to(tl.float64) + gumbel(substream(key, 2), ids))
    token = first + tl.where(greedy, _argmax(x), drawn)

    total, total_kept = tl.sum(tl.exp(raw), 0), tl.sum(tl.exp(processed), 0)
    sound = (total > 0.0) & (total < float("inf")) & (total_kept > 0.0) & (total_kept < float("inf"))
    chosen = tl.load(logits + token, token < VOCAB, float("nan"))
    scaled = scale(chosen, peak, heat) - summit
    nan = float("nan")
    tl.store(tokens + row, tl.where(sound, token, -1).to(tl.int64))
    tl.store(logprob_raw + row, tl.where(sound, chosen - peak - tl.log(total), nan))
    tl.store(logprob_sampling + row, tl.where(sound, scaled - tl.log(tl.sum(tl.exp(sampling), 0)), nan))
    tl.store(logprob_processed + row, tl.where(sound, scaled - tl.log(total_kept), nan))


@cache
def builds(vocab: int, stride: int) -> tuple[Build, Build, Build]:
    """How the kernels are compiled: those that share rows, the filters', the draw's."""
    blocks = cdiv(vocab, BLOCK)
    shape = {"VOCAB": vocab, "STRIDE": stride, "BLOCK": BLOCK, "BLOCKS": blocks}
    row = shape | {"TILE": next_power_of_2(blocks)}
    return (
        Build(constants=shape | {"GROUP": GROUP}, num_warps=8, num_stages=1),
        Build(constants=row | {"CAPACITY": CAPACITY, "CHUNK": CHUNK}, num_warps=16, num_stages=1),
        Build(constants=row, num_warps=8, num_stages=1),
    )


def find_floors(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The first two launches: blocks [B, 4, BLOCKS] but for the last kind, peaks [B] and floors [B]."""
    rows, vocab = logits.shape
    shared, filters, _ = builds(vocab, logits.stride(0))
    count = shared.constants["BLOCKS"]
    blocks, peaks = logits.new_empty(rows, 4, count), logits.new_empty(rows)
    floors = logits.new_empty(rows, dtype=torch.int64)
    candidates = floors.new_empty(rows, CAPACITY)
    shared.run(blocks_kernel, (rows, cdiv(count, GROUP)), logits, temperature, blocks)
    columns = temperature, top_k, top_p, min_p
    filters.run(floors_kernel, (rows,), logits, *columns, blocks, candidates, peaks, floors)
    return blocks, peaks, floors


def launch(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The op, for checked arguments: tokens, and their raw, sampling and processed logprobs.

    Nothing waits for the device, and shapes alone decide what is launched: fit for a CUDA graph.
    """
    rows, vocab = logits.shape
    if not 0 < vocab <= LAST_ID.value:
        raise misfit("vocabulary empty or too large", vocab, f"sample from 1 to {LAST_ID.value} logits")
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    temperature, seeds, positions = temperature.contiguous(), seeds.contiguous(), positions.contiguous()
    filters = top_k.contiguous(), top_p.contiguous(), min_p.contiguous()
    blocks, peaks, floors = find_floors(logits, temperature, *filters)
    shared, _, draw = builds(vocab, logits.stride(0))
    grid = rows, cdiv(blocks.shape[2], GROUP)
    shared.run(kept_kernel, grid, logits, temperature, peaks, floors, blocks)
    tokens = torch.empty_like(floors)
    raw, sampling, processed = (torch.empty_like(peaks) for _ in range(3))
    found = peaks, floors, blocks
    draw.run(
        draw_kernel, (rows,), logits, temperature, seeds, positions, *found, tokens, raw, sampling, processed
    )
    return tokens, raw, sampling, processed


ARGUMENTS = {
    "logits": "*fp32",
    "temperature": "*fp32",
    "top_k": "*i32",
    "top_p": "*fp32",
    "min_p": "*fp32",
    "seeds": "*i64",
    "positions": "*i64",
    "peaks": "*fp32",
    "floors": "*i64",
    "blocks": "*fp32",
    "candidates": "*i64",
    "tokens": "*i64",
    "logprob_raw": "*fp32",
    "logprob_sampling": "*fp32",
    "logprob_processed": "*fp32",
}
"""Their types, whichever kernel has them."""


def _spec(name: str, kernel: triton.JITFunction, vocab: int, build: Build) -> Spec:
    names = [argument for argument in kernel.arg_names if argument in ARGUMENTS]
    types = {argument: ARGUMENTS[argument] for argument in names}
    return Spec(name=f"sample {name} {vocab}", kernel=kernel, types=types, aligned=tuple(names), build=build)


SPECS = tuple(
    _spec(name, kernel, vocab, builds(vocab, vocab)[which])
    for vocab in (151936, 49152)
    for name, kernel, which in (
        ("blocks", blocks_kernel, 0),
        ("floors", floors_kernel, 1),
        ("kept", kept_kernel, 0),
        ("draw", draw_kernel, 2),
    )
)
