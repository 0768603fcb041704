"""A vocabulary taken in parts, so that the logits of a part are all that exist at a time."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

COLUMNS = 128
"""A part is a multiple of this, but the last: products like it so."""


def parts(tokens: int, vocab: int, elements: int) -> Iterator[slice]:
    """The vocabulary in order: parts with up to `elements` logits of all tokens, or `COLUMNS` of each."""
    step = max(1, elements // max(tokens, 1) // COLUMNS) * COLUMNS
    return (slice(start, min(start + step, vocab)) for start in range(0, vocab, step))


def gradients(
    hidden: Tensor,
    weight: Tensor,
    slopes: Callable[[slice], Tensor],
    elements: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias [V] from those of the logits, summed in float32 or wider.

    Args:
        hidden: [T, H].
        weight: [V, H].
        slopes: the gradient of the logits of a part, [T, part]; products are made in its dtype.
        elements: of a part, at most.
        wanted: which of the three; the others are [0].
    """
    sizes = hidden.shape, weight.shape, weight.shape[:1]
    dtypes = torch.promote_types(hidden.dtype, torch.float32), weight.dtype, weight.dtype
    grad_hidden, grad_weight, grad_bias = (
        hidden.new_zeros(size if want else 0, dtype=dtype)
        for size, dtype, want in zip(sizes, dtypes, wanted, strict=True)
    )
    for part in parts(len(hidden), len(weight), elements):
        slope = slopes(part)
        if wanted[0]:
            _add_product(grad_hidden, slope, weight[part])
        if wanted[1]:
            grad_weight[part] = slope.t() @ hidden.to(slope.dtype)
        if wanted[2]:
            grad_bias[part] = slope.sum(0, dtype=grad_hidden.dtype)
    return grad_hidden.to(hidden.dtype), grad_weight, grad_bias


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b; it isn't rounded to a's dtype first."""
    if a.is_cuda and a.dtype != total.dtype:
        total.add_(torch.mm(a, b, out_dtype=total.dtype))
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
