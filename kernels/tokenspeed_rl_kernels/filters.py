"""Top-k, top-p and min-p as one threshold per row of logits: what lies below becomes -inf.

The largest logits of a row, sorted, tell how many tokens stay, and the smallest of these is the threshold. A
thousand are enough nearly always; whole vocabularies are sorted only for the rows that need it.
"""

import torch
from torch import Tensor

CANDIDATES = 1024
"""Largest logits of a row that are looked at before all of them are."""
LARGEST_TOPK = 4096
"""Above it a full sort is faster than torch.topk."""


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Keep each row's top-k; of these the top-p; of these the min-p.

    Args:
        logits: [B, V] float32, divided by the temperature.
        top_k: [B] integers: exactly this many stay, at ties the lowest ids; <= 0 or >= V: off.
        top_p: [B]: the fewest, largest first, whose probabilities, renormalised after top-k, sum to this much
            stay; at least one, at ties the lowest ids; >= 1: off.
        min_p: [B]: those at least this many times as probable as the likeliest stay; 0: off.

    Returns:
        [B, V]: ``logits`` itself if no row has anything on, else a copy with -inf. Rows with NaN stay as are.
    """
    vocab = logits.shape[1]
    counts = torch.where((top_k <= 0) | (top_k >= vocab), vocab, top_k).long()
    ranked = (counts < vocab) | (top_p < 1)
    if not bool((ranked | (min_p > 0)).any()):
        return logits
    threshold = logits.amax(1) + min_p.to(logits.dtype).log()
    tied: list[tuple[int, float, int]] = []
    rows = ranked.nonzero().squeeze(1)
    width = _candidates(counts[rows], vocab)
    while len(rows):
        part = logits if len(rows) == len(logits) else logits[rows]
        lowest, quota, complete = _rank(part, counts[rows], top_p[rows].double(), width)
        done = rows[complete]
        threshold[done] = torch.maximum(threshold[done], lowest[complete])
        listed = zip(rows.tolist(), lowest.tolist(), quota.tolist(), complete.tolist(), strict=True)
        tied += [(row, value, number) for row, value, number, sure in listed if sure and number >= 0]
        rows, width = rows[~complete], vocab
    kept = torch.where(logits < threshold.unsqueeze(1), -torch.inf, logits)
    for row, value, number in tied:
        kept[row, (logits[row] == value).nonzero().squeeze(1)[number:]] = -torch.inf
    return kept


def _candidates(counts: Tensor, vocab: int) -> int:
    """How many of the largest logits to look at: one more than top-k keeps, to see ties across its edge."""
    limited = counts < vocab
    widest = int(torch.where(limited, counts, CANDIDATES).amax()) if len(counts) else 0
    return min(widest + 1, vocab)


def _rank(logits: Tensor, counts: Tensor, top_p: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Top-k and top-p of [R, V], by the ``width`` largest of each row.

    Returns:
        threshold [R]: the smallest logit that stays; quota [R]: how many of those equal to it stay, -1: all;
        complete [R] bool: False where ``width`` is too small to tell.
    """
    vocab = logits.shape[1]
    values = logits.topk(width, 1).values if width <= LARGEST_TOPK else logits.sort(1, descending=True).values
    width = values.shape[1]
    limited = counts < vocab
    mass = (values.double() - values[:, :1].double()).exp_().cumsum(1)
    whole = (logits - values[:, :1]).exp_().sum(1, dtype=torch.float64)
    total = torch.where(limited, mass.gather(1, (counts.clamp(max=width) - 1).unsqueeze(1)).squeeze(1), whole)
    before = torch.cat((mass.new_zeros(len(mass), 1), mass[:, :-1]), 1)
    # The whole mass is a sum of float32 numbers: at p = 1 no token must fall to their rounding.
    nucleus = ((before < (top_p * total).unsqueeze(1)) | (top_p >= 1).unsqueeze(1)).sum(1)
    stay = torch.minimum(nucleus.clamp(min=1), counts)
    threshold = values.gather(1, stay.unsqueeze(1) - 1)
    following = values.gather(1, stay.clamp(max=width - 1).unsqueeze(1))
    straddled = ((following == threshold) & threshold.isfinite()).squeeze(1) & (stay < width)
    above = (values > threshold).sum(1)
    complete = limited | (stay < width) | (width == vocab)
    return threshold.squeeze(1), torch.where(straddled, stay - above, -1), complete
