"""Top-k, top-p and min-p as one number per row: the lowest rank that stays.

A token's rank is an integer that orders a row as sampling does, the larger logit first and of equal ones
the lower id. No two tokens share one, so ties need no care: "the k likeliest" is "rank >= floor".

The floor is found by bisection, counting tokens or adding up their probabilities at each step. A bound known
from the blocks' maxima and log-sum-exp leaves few tokens that matter, which are put aside once and searched
instead of the row; a row that leaves too many is searched itself. Probabilities are added up as integers:
the sum is exact, whatever its order.
"""

import triton
import triton.language as tl

ID_BITS = tl.constexpr(20)
"""Of a rank, below the 32 of the logit: vocabularies of a million tokens."""
LAST_ID = tl.constexpr((1 << 20) - 1)
LOWEST = tl.constexpr(1 << 43)
"""The least rank of a finite logit: in 32 bits and in order, the most negative one is 2^23."""
UNIT = tl.constexpr(2.0**42)
"""The likeliest token's weight: a million of them stay below 2^63."""
SLACK = tl.constexpr(0.99)
"""A bound from rounded sums is kept this far from what it must not cross."""


@triton.jit
def rank_of(value, ids):
    """int64 >= 0: the order of tokens by (value, largest first; id, lowest first)."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 0x80000000
    return (key << ID_BITS) + (LAST_ID - ids)


@triton.jit
def value_of(rank):
    """The float32 of a rank."""
    key = ((rank >> ID_BITS) - 0x80000000).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def heat_of(temperature):
    """What logits are divided by: greedy rows aren't."""
    return tl.where(temperature == 0.0, 1.0, temperature)


@triton.jit
def scale(logits, peak, heat):
    """Logits / heat, shifted to maximum 0 first unless heat is 1. Rounded alike in every kernel."""
    return tl.where(heat == 1.0, logits, tl.div_rn(logits - peak, heat))


@triton.jit
def _weigh(value, summit, counted):
    """int64: probability in units, 0 where not `counted`."""
    return (tl.where(counted, tl.exp(value - summit), 0.0) * UNIT).to(tl.int64)


@triton.jit
def _kth_largest(ranks, k):
    """A rank that at least k of `ranks` reach, the largest where it matters; LOWEST if there are fewer."""
    low = tl.full([], LOWEST, tl.int64)
    high = tl.max(ranks, 0) + 1
    number = tl.full([], 0, tl.int32)
    while (high - low > 1) & (number != k):
        middle = low + ((high - low) >> 1)
        number = tl.sum((ranks >= middle).to(tl.int32), 0)
        low = tl.where(number >= k, middle, low)
        high = tl.where(number >= k, high, middle)
    return low


@triton.jit
def _put_aside(
    logits,
    candidates,
    low,
    high,
    peak,
    heat,
    VOCAB: tl.constexpr,
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write a row's ranks in low .. high - 1, as many as fit -> their number, and all tokens' weight."""
    summit = scale(peak, peak, heat)
    number = tl.full([], 0, tl.int32)
    weight = tl.zeros([CHUNK], tl.int64)
    for start in range(0, VOCAB, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        value = scale(tl.load(logits + ids, ids < VOCAB, float("-inf")), peak, heat)
        weight += _weigh(value, summit, ids < VOCAB)
        rank = rank_of(value, ids)
        chosen = ((rank >= low) & (rank < high) & (ids < VOCAB)).to(tl.int32)
        place = number + tl.cumsum(chosen, 0) - chosen
        tl.store(candidates + place, rank, (chosen == 1) & (place < CAPACITY))
        number += tl.sum(chosen, 0)
    tl.debug_barrier()  # other threads read what these wrote
    return number, tl.sum(weight, 0)


@triton.jit
def _above(
    rank,
    logits,
    candidates,
    number,
    peak,
    heat,
    VOCAB: tl.constexpr,
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """How many tokens rank as high or higher, and their weight: of `number` candidates, or the whole row."""
    summit = scale(peak, peak, heat)
    count = tl.zeros([CHUNK], tl.int32)
    weight = tl.zeros([CHUNK], tl.int64)
    for start in range(0, tl.where(number <= CAPACITY, number, VOCAB), CHUNK):
        ids = start + tl.arange(0, CHUNK)
        if number <= CAPACITY:
            ranks = tl.load(candidates + ids, ids < number, -1)
        else:
            value = scale(tl.load(logits + ids, ids < VOCAB, float("-inf")), peak, heat)
            ranks = tl.where(ids < VOCAB, rank_of(value, ids), -1)
        above = ranks >= rank
        count += above.to(tl.int32)
        weight += _weigh(value_of(ranks), summit, above)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def _search(
    low,
    inside,
    goal,
    logits,
    candidates,
    number,
    peak,
    heat,
    BY_WEIGHT: tl.constexpr,
    VOCAB: tl.constexpr,
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The largest rank above which, itself included, are `goal` tokens or weight -> it, and their weight.

    `inside` tokens rank from `low` on, which isn't too high; nor is it too low if there are too few.
    """
    high = rank_of(scale(peak, peak, heat), 0) + 1
    outside, outside_weight = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)
    beyond, beyond_weight = outside, outside_weight  # of the candidates
    while (high - low > 1) & (inside - outside > 1):
        if (number > CAPACITY) & (inside - outside <= CAPACITY):
            number, _ = _put_aside(logits, candidates, low, high, peak, heat, VOCAB, CAPACITY, CHUNK)
            beyond, beyond_weight = outside, outside_weight
        middle = low + ((high - low) >> 1)
        count, weight = _above(middle, logits, candidates, number, peak, heat, VOCAB, CAPACITY, CHUNK)
        count += beyond
        weight += beyond_weight
        enough = (weight if BY_WEIGHT else count) >= goal
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        inside = tl.where(enough, count, inside)
        outside = tl.where(enough, outside, count)
        outside_weight = tl.where(enough, outside_weight, weight)
    return low, inside


@triton.jit
def floors_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    blocks,
    candidates,
    peaks,
    floors,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """peaks [B] fp32, the rows' largest logits, and floors [B] int64, the least ranks that stay (0: all).

    Of logits [B, VOCAB] and blocks [B, 4, BLOCKS] (see `sample`); candidates [B, CAPACITY] int64 are scratch.
    TILE >= BLOCKS is a power of 2. Grid (B,).
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, TILE)
    blocks += row * 4 * BLOCKS
    largest = tl.load(blocks + block, block < BLOCKS, float("-inf"))
    peak = tl.max(largest, 0)
    tl.store(peaks + row, peak)

    k, p, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    temperature = tl.load(temperature + row)
    heat = heat_of(temperature)
    limited = (k > 0) & (k < VOCAB)
    on = (temperature != 0.0) & (limited | (p < 1.0) | (least > 0.0))
    floor = tl.full([], 0, tl.int64)
    if on:
        summit = scale(peak, peak, heat)
        logsum = tl.load(blocks + 2 * BLOCKS + block, block < BLOCKS, float("-inf"))
        highest = scale(largest, peak, heat)
        total = tl.sum(tl.exp(highest - summit + logsum), 0)
        sound = (total > 0.0) & (total < float("inf"))  # a row without a distribution is left alone
        if sound & (limited | (p < 1.0)):
            logits += row * STRIDE
            candidates += row * CAPACITY
            if limited:
                # As many blocks hold a token that ranks at least as high as the last of a block would.
                floor = _kth_largest(rank_of(highest, block * BLOCK + BLOCK - 1), k)
            else:
                # Tokens below, were there VOCAB of them, would sum to less than 1 - p.
                tail = (1.0 - p) * total * SLACK / VOCAB
                floor = tl.maximum(rank_of(summit + tl.log(tail), LAST_ID), LOWEST)
            top = rank_of(summit, 0) + 1
            number, weight = _put_aside(logits, candidates, floor, top, peak, heat, VOCAB, CAPACITY, CHUNK)
            inside = number
            if limited:
                floor, inside = _search(
                    floor, inside, k, logits, candidates, number, peak, heat, False, VOCAB, CAPACITY, CHUNK
                )
                _, weight = _above(floor, logits, candidates, number, peak, heat, VOCAB, CAPACITY, CHUNK)
            if p < 1.0:
                goal = tl.maximum(tl.ceil(p.to(tl.float64) * weight.to(tl.float64)).to(tl.int64), 1)
                floor, inside = _search(
                    floor, inside, goal, logits, candidates, number, peak, heat, True, VOCAB, CAPACITY, CHUNK
                )
        if sound & (least > 0.0):
            floor = tl.maximum(floor, rank_of(summit + tl.log(least), LAST_ID))
    tl.store(floors + row, floor)
