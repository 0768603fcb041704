"""What decode and prefill do alike, so that they agree bit for bit.

A context is cut into splits of 256 tokens, counted from its first token, and a split into tiles of keys.
Within a split the softmax runs online, tile after tile; the splits' states are merged in order. A state is
(largest logit, sum of exponentials, sum of values weighted by them), in float32, with logits in base 2. What
a query doesn't see leaves its state as it was, to the bit: which tiles others need is no matter.
"""

import triton
import triton.language as tl


@triton.jit
def base_of(top):
    """What to subtract from logits whose largest is top: top, or 0 where there are none."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def span_of(stop, window):
    """The first token that any row sees, and the end of those; stop is 0 for rows that aren't there."""
    first = tl.min(tl.where(stop > 0, tl.maximum(stop - window, 0), 2147483647), 0)
    return first, tl.max(stop, 0)


@triton.jit
def logits_of(q, k, factor, cap, CAPPED: tl.constexpr):
    """Logits in base 2; if CAPPED, cap * tanh(x), for which the factor gives 2 x / ln(2)."""
    products = tl.dot(q, tl.trans(k), input_precision="ieee") * factor
    if CAPPED:
        tail = tl.exp2(-tl.abs(products))
        bounded = (1.0 - tail) / (1.0 + tail) * cap
        products = tl.where(products < 0.0, -bounded, bounded)
    return products


@triton.jit
def merge(top, mass, acc, top_next, mass_next, acc_next):
    """One state of two; of an empty one and another, the other."""
    top_both = tl.maximum(top, top_next)
    base = base_of(top_both)
    here, there = tl.exp2(top - base), tl.exp2(top_next - base)
    return top_both, mass * here + mass_next * there, acc * here[:, None] + acc_next * there[:, None]


@triton.jit
def finish(top, mass, acc, sinks, head, inside, SINKS: tl.constexpr):
    """The output of a state: its mean of values, 0 where it is empty; `sinks` are one more logit per head."""
    if SINKS:
        sink = tl.load(sinks + head, inside, 0.0).to(tl.float32) * 1.4426950408889634
        top, mass, acc = merge(
            top, mass, acc, sink, tl.full(mass.shape, 1.0, tl.float32), tl.zeros(acc.shape, tl.float32)
        )
    return acc / tl.where(mass == 0.0, 1.0, mass)[:, None]


@triton.jit
def load_rows(base, row, inside, DIM: tl.constexpr, PADDED: tl.constexpr):
    """[rows, PADDED] of contiguous rows of DIM; 0 outside."""
    column = tl.arange(0, PADDED)
    return tl.load(
        base + row.to(tl.int64)[:, None] * DIM + column[None, :],
        inside[:, None] & (column < DIM)[None, :],
        0.0,
    )


@triton.jit
def store_rows(base, row, inside, rows, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Write what `load_rows` reads, in the dtype that lies there."""
    column = tl.arange(0, PADDED)
    at = base + row.to(tl.int64)[:, None] * DIM + column[None, :]
    tl.store(at, rows.to(base.dtype.element_ty), inside[:, None] & (column < DIM)[None, :])


@triton.jit
def attend_split(
    q,
    stop,
    first,
    last,
    pages,
    k_cache,
    v_cache,
    kv_head,
    window,
    factor,
    cap,
    CAPPED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The state of queries [QUERIES, PADDED] after tokens [first, last), all of one split.

    A query sees the `window` tokens before its `stop`. `pages` is where the context's page ids lie.
    """
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, VALUE_PADDED], tl.float32)
    for start in range(first // KEYS * KEYS, last, KEYS):
        token = start + tl.arange(0, KEYS)
        inside = (token >= first) & (token < last)
        page = tl.load(pages + token // PAGE, inside, 0).to(tl.int64)
        slot = (page * KV_HEADS + kv_head) * PAGE + token % PAGE
        k = load_rows(k_cache, slot, inside, DIM, PADDED)
        v = load_rows(v_cache, slot, inside, VALUE_DIM, VALUE_PADDED)
        behind = stop[:, None] - token[None, :]
        seen = (behind > 0) & (behind <= window)
        logits = tl.where(seen, logits_of(q, k, factor, cap, CAPPED), float("-inf"))
        top_both = tl.maximum(top, tl.max(logits, 1))
        base = base_of(top_both)
        before, weights = tl.exp2(top - base), tl.exp2(logits - base[:, None])
        mass = mass * before + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * before[:, None], input_precision="ieee")
        top = top_both
    return top, mass, acc
