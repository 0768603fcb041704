"""What is read off a step's hidden states instead of drawn from their logits: embeddings, scores, values."""

from __future__ import annotations

from itertools import islice

from torch import Tensor

from tokenspeed_rl.core.batch import StepPlan
from tokenspeed_rl.core.request import Request
from tokenspeed_rl.models import Decoder

Rows = list[list[float]]


def read(plan: StepPlan, hidden: Tensor, decoder: Decoder) -> list[tuple[Request, Rows]]:
    """One row for each token that a request reads in this step: its last token's, or, for values, those of
    the whole chunk, which a fork of the prompt gets from its leader.

    Args:
        plan: the step.
        hidden: [T, hidden_size], its decode rows first, then its chunks.
        decoder: whose head is read with.
    """
    spans: list[tuple[Request, range]] = []
    end = len(plan.decodes)
    for chunk in plan.chunks:
        start, end = end, end + chunk.count
        if chunk.request.wants.reading == "values":
            spans.append((chunk.request, range(start, end)))
        elif chunk.completes:
            spans += [(r, range(end - 1, end)) for r in plan.sharers(chunk) if r.wants.reading]
    if not spans:
        return []
    rows = iter(decoder.read(hidden[[at for _, span in spans for at in span]]).tolist())
    return [(request, list(islice(rows, len(span)))) for request, span in spans]
