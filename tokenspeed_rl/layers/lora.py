"""LoRA beside a projection: for the rows of each adapter, y += scaling * B(A(x)), nothing merged.

Source: Hu et al. 2021; casts and the order of operations are those of PEFT's linear layer.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from tokenspeed_rl.weights.adapters import Adapter, LowRank
from tokenspeed_rl_kernels import linear


class AdaptedRows(NamedTuple):
    """Which rows of a step an adapter is for."""

    adapter: Adapter
    rows: Tensor | None
    """[n] int64; None: all."""


Added = Sequence[tuple[Tensor | None, tuple[LowRank, ...]]]
"""What adapters add to one projection: rows (None: all), and the parts of its columns."""


def added_to(slot: str, adapted: Sequence[AdaptedRows]) -> Added:
    """What the step's adapters add to the projection of `slot`."""
    if not adapted:
        return ()
    return [(rows, parts) for adapter, rows in adapted if (parts := adapter.slots.get(slot))]


def add_low_rank(y: Tensor, x: Tensor, added: Added) -> Tensor:
    """Add to y [T, N], in place, what adapters make of x [T, K]; returns y.

    An adapter of another dtype is computed in its own, and the sum is rounded once to y's.
    """
    for rows, parts in added:
        inputs = x if rows is None else x[rows]
        for part in parts:
            columns = y[:, part.start : part.stop]
            low = linear(inputs.to(part.down.dtype), part.down)
            delta = linear(low, part.up) * part.scaling
            if rows is None:
                columns.add_(delta)
            else:
                columns[rows] = (columns[rows] + delta).to(y.dtype)
    return y
