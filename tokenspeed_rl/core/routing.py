"""Which experts computed the tokens of a step: counted for the record, row by row for requests that ask."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenspeed_rl.core.batch import Chunk
from tokenspeed_rl.core.request import Request
from tokenspeed_rl.layers.moe import ExpertSpec
from tokenspeed_rl.models import DecoderSpec

NO_EXPERT = -1
"""What a layer without experts has in a row."""


def count_experts(routes: Sequence[Tensor], spec: ExpertSpec) -> npt.NDArray[np.int64]:
    """[layers with experts, E]: how many tokens each expert computed, of routes [T, k] per such layer."""
    counts = [torch.bincount(chosen.flatten(), minlength=spec.count) for chosen in routes]
    return torch.stack(counts).cpu().numpy()


def rows_asked_for(spans: Sequence[Chunk]) -> list[tuple[Request, range]]:
    """Requests that ask for routes, each with its rows among the step's tokens that it doesn't know yet."""
    found, begin = [], 0
    for span in spans:
        if span.request.wants.routed_experts:
            known = max(0, len(span.request.routes) - span.start)
            if known < span.count:
                found.append((span.request, range(begin + known, begin + span.count)))
        begin += span.count
    return found


def read_rows(
    routes: Sequence[Tensor], asked: Sequence[tuple[Request, range]], spec: DecoderSpec
) -> list[tuple[Request, list[npt.NDArray[np.int16]]]]:
    """The rows asked for, each [layers, k] on the host, of routes [T, k] per layer with experts."""
    where = torch.tensor([row for _, rows in asked for row in rows], device=routes[0].device)
    chosen = torch.stack(list(routes), 1)[where].to(torch.int16).cpu().numpy()
    whole = np.full((len(chosen), spec.num_layers, chosen.shape[2]), NO_EXPERT, dtype=np.int16)
    whole[:, spec.expert_layers] = chosen
    found, begin = [], 0
    for request, rows in asked:  # copied, so that a request keeps nothing of the others' rows
        found.append((request, [row.copy() for row in whole[begin : begin + len(rows)]]))
        begin += len(rows)
    return found
