"""Drawing a token per row: Gumbel-max (Maddison et al. 2014) in two levels, keyed by (seed, position).

    argmax_i (logits[i] + Gumbel_i)  is a draw from  softmax(logits)

The same holds for blocks of tokens, whose logits are their log-sum-exp: one Gumbel number per block chooses
the block, then one per token chooses the token in it. The draw is as exact, noise is made for V / 256 + 256
numbers instead of V, and the blocks' log-sum-exp give the row's normaliser too.

Noise comes from counters (`gumbel`): a draw depends on the row's logits, its seed and its position, and on
nothing else, neither its place in the batch nor its mates.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_rl_kernels.checks import misfit, shapes
from tokenspeed_rl_kernels.filters import filter_logits
from tokenspeed_rl_kernels.gumbel import gumbel, row_keys, substream
from tokenspeed_rl_kernels.registry import op, runs_triton

BLOCK = 256
"""Tokens per block. Part of the definition of a draw: another size draws other tokens."""
SCRATCH = 1 << 19
"""Logits whose exponentials exist at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A shape to test."""

    name: str
    rows: int
    vocab: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


CASES = (
    Case(name="one row", rows=1, vocab=1000),
    Case(name="one block", rows=3, vocab=256),
    Case(name="less than a block", rows=3, vocab=7),
    Case(name="one token", rows=2, vocab=1),
    Case(name="smollm2", rows=8, vocab=49152, temperature=0.6),
    Case(name="greedy", rows=3, vocab=1000, temperature=0.0),
    Case(name="top-k", rows=3, vocab=1000, top_k=5, temperature=0.7),
    Case(name="top-p", rows=3, vocab=1000, top_p=0.9),
    Case(name="top-p of many", rows=2, vocab=20000, top_p=0.99, temperature=3.0),
    Case(name="min-p", rows=3, vocab=1000, min_p=0.1),
    Case(name="all", rows=3, vocab=1000, top_k=50, top_p=0.9, min_p=0.02, temperature=1.3),
    Case(name="large vocabulary", rows=2, vocab=131072, top_p=0.95),
)


class SampleOutput(NamedTuple):
    """Tokens [B] int64, and their logprobs [B] float32. A row that nothing can be drawn from: -1 and NaN."""

    tokens: Tensor
    logprob_raw: Tensor
    """log_softmax(logits)."""
    logprob_sampling: Tensor
    """log_softmax(logits / temperature)."""
    logprob_processed: Tensor
    """Of the distribution drawn from."""


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> SampleOutput:
    """Temperature, top-k, top-p, min-p, in this order, then the draw.

    Args:
        logits: [B, V] float32.
        temperature: [B] float32, >= 0. At 0: the argmax (lowest id on ties), and all logprobs are raw.
        top_k: [B] integers, see `filter_logits`, as for the next two.
        top_p: [B] float32.
        min_p: [B] float32.
        seeds: [B] int64, any value.
        positions: [B] int64: what makes each draw of a sequence another one.

    Returns:
        Tokens and logprobs; -1 and NaN where a row has a NaN, an infinite or no finite logit.

    Raises:
        ValueError: shapes misfit, logits aren't float32, or a GPU is given a vocabulary of more than 2^20
            tokens.
    """
    return SampleOutput(*sample_columns(logits, temperature, top_k, top_p, min_p, seeds, positions))


def _fake(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = len(logits)
    raw, sampling, processed = (logits.new_empty(rows) for _ in range(3))
    return seeds.new_empty(rows), raw, sampling, processed


@op(_fake)
def sample_columns(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`sample`, its output's columns a plain tuple, as torch wants it of an op."""
    rows = logits.shape[:1]
    columns = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    columns |= {"seeds": seeds, "positions": positions}
    if logits.ndim != 2 or any(column.shape != rows for column in columns.values()):
        raise misfit("shapes misfit", shapes(logits=logits, **columns), "pass logits [B, V] and the rest [B]")
    if any(x.dtype != torch.float32 for x in (logits, temperature, top_p, min_p)):
        dtypes = logits.dtype, temperature.dtype, top_p.dtype, min_p.dtype
        raise misfit("dtypes misfit", dtypes, "pass float32 logits, temperature, top_p and min_p")
    if top_k.dtype not in (torch.int32, torch.int64) or {seeds.dtype, positions.dtype} != {torch.int64}:
        integers = top_k.dtype, seeds.dtype, positions.dtype
        raise misfit("dtypes misfit", integers, "pass int32 or int64 top_k, int64 seeds and positions")
    if runs_triton(logits):
        from tokenspeed_rl_kernels.gpu import sample as gpu

        return gpu.launch(logits, temperature, top_k, top_p, min_p, seeds, positions)
    greedy = temperature == 0
    raw = block_logsumexp(logits)
    scaled = scale_logits(logits, temperature)
    sampling = raw if scaled is logits else block_logsumexp(scaled)
    top_k, top_p = top_k.masked_fill(greedy, 0), top_p.masked_fill(greedy, 1.0)
    kept = filter_logits(scaled, top_k, top_p, min_p.masked_fill(greedy, 0.0))
    processed = sampling if kept is scaled else block_logsumexp(kept)
    tokens = draw(kept, seeds, positions, blocks=processed)
    if bool(greedy.any()):
        tokens = torch.where(greedy & (tokens >= 0), argmax(logits), tokens)
    return (
        tokens,
        token_logprob(logits, tokens, raw),
        token_logprob(scaled, tokens, sampling),
        token_logprob(kept, tokens, processed),
    )


def scale_logits(logits: Tensor, temperature: Tensor) -> Tensor:
    """[B, V] / temperature [B], up to a constant per row; rows of temperature 0 or 1 as they are.

    ``logits`` itself if all are. Another row is shifted to maximum 0 first, so that no temperature is too
    small.
    """
    as_is = (temperature == 0) | (temperature == 1)
    if bool(as_is.all()):
        return logits
    shift = torch.where(as_is, 0.0, logits.amax(1)).unsqueeze(1)
    return (logits - shift).div_(torch.where(as_is, 1.0, temperature).unsqueeze(1))


def block_logsumexp(logits: Tensor) -> Tensor:
    """[B, V] -> [B, ceil(V / BLOCK)]: log-sum-exp of each block of tokens. Over these, that of the row."""
    rows, vocab = logits.shape
    whole = vocab // BLOCK
    out = logits.new_empty(rows, -(-vocab // BLOCK))
    step = max(1, SCRATCH // max(1, vocab))
    for start in range(0, rows, step):
        part, result = logits[start : start + step], out[start : start + step]
        if whole:
            result[:, :whole] = part[:, : whole * BLOCK].unflatten(1, (whole, BLOCK)).logsumexp(2)
        if vocab % BLOCK:
            result[:, whole] = part[:, whole * BLOCK :].logsumexp(1)
    return out


def token_logprob(logits: Tensor, tokens: Tensor, blocks: Tensor) -> Tensor:
    """[B]: log_softmax(logits [B, V])[tokens [B]], given its `block_logsumexp`; NaN for a token of -1."""
    chosen = logits.gather(1, tokens.clamp(min=0).unsqueeze(1)).squeeze(1)
    return (chosen - blocks.logsumexp(1)).masked_fill(tokens < 0, torch.nan)


def draw(logits: Tensor, seeds: Tensor, positions: Tensor, *, blocks: Tensor | None = None) -> Tensor:
    """Draw from softmax(logits) of each row; -inf is never drawn.

    Args:
        logits: [B, V] float32.
        seeds: [B] int64.
        positions: [B] int64.
        blocks: `block_logsumexp` of the logits, if it is known already.

    Returns:
        [B] int64 tokens; -1 where a row has a NaN, an infinite or no finite logit.
    """
    blocks = block_logsumexp(logits) if blocks is None else blocks
    keys = row_keys(seeds, positions)
    vocab, device = logits.shape[1], logits.device
    block = _perturbed_argmax(blocks, substream(keys, 1), torch.arange(blocks.shape[1], device=device))
    ids = block.unsqueeze(1) * BLOCK + torch.arange(BLOCK, device=device)
    values = logits.gather(1, ids.clamp(max=vocab - 1)).masked_fill_(ids >= vocab, -torch.inf)
    token = block * BLOCK + _perturbed_argmax(values, substream(keys, 2), ids)
    return token.masked_fill(~blocks.logsumexp(1).isfinite(), -1)


def argmax(logits: Tensor) -> Tensor:
    """[B, V] -> [B] int64: the first largest logit, by blocks: much faster than torch.argmax on the CPU."""
    vocab = logits.shape[1]
    whole = vocab // BLOCK * BLOCK
    best, tail = logits[:, :whole].unflatten(1, (-1, BLOCK)).amax(2), logits[:, whole:]
    if tail.shape[1]:
        best = torch.cat((best, tail.amax(1, keepdim=True)), 1)
    ids = best.argmax(1, keepdim=True) * BLOCK + torch.arange(BLOCK, device=logits.device)
    # Past the end the last token stands in: the first largest is never one of its copies.
    first: Tensor = ids[:, 0] + logits.gather(1, ids.clamp(max=vocab - 1)).argmax(1)
    return first


def _perturbed_argmax(logits: Tensor, keys: Tensor, items: Tensor) -> Tensor:
    """[B, N] logits with Gumbel noise for counters ``items`` [N] or [B, N] -> [B] the first largest."""
    return (logits.double() + gumbel(keys, items.expand(len(logits), -1))).argmax(1)
