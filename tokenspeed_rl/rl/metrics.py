"""Numbers about a step that add up exactly however the step was split."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tokenspeed_rl.rl.masked import masked_sum

MetricTensors = dict[str, Tensor]
"""Detached metrics of one micro-batch: (sum, count) of a mean as float64 [2], or a maximum, 0-dim."""


def mean_of(x: Tensor, mask: Tensor) -> Tensor:
    """(sum of `x` over `mask`, entries in `mask`) as a detached float64 [2] tensor."""
    return torch.stack((masked_sum(x.detach().double(), mask), mask.sum().double()))


class Metrics:
    """Gathers the `MetricTensors` of micro-batches; `compute()` gives the numbers of all as of one batch."""

    def __init__(self) -> None:
        self._totals: MetricTensors = {}

    def update(self, metrics: Mapping[str, Tensor]) -> None:
        """Adds one micro-batch: sums and counts add, maxima compete. No device sync."""
        for name, value in metrics.items():
            total = self._totals.get(name)
            if total is None:
                self._totals[name] = value.detach().clone()
            else:
                self._totals[name] = total + value if value.dim() else torch.maximum(total, value)

    def compute(self) -> dict[str, float]:
        """Means and maxima by name; 0.0 for the mean of nothing."""
        return {name: self._number(total) for name, total in self._totals.items()}

    @staticmethod
    def _number(total: Tensor) -> float:
        if total.dim() == 0:
            return total.item()
        value, count = total.tolist()
        return value / count if count else 0.0
