"""A trainer's logprobs and entropies from hidden states, without the logits of the whole vocabulary.

z = (h W^T + b) / temperature; logprob = z[target] - log sum_j exp(z_j); entropy = -sum_j p_j log p_j with
p = softmax(z). The vocabulary is taken in parts: forwards with a running maximum and sum (Milakov and
Gimelshein 2018), backwards by computing each part once more, from d logprob / d z_j = [j = target] - p_j and
d entropy / d z_j = -p_j (log p_j + entropy). What lives beside the arguments and their gradients is a part.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tokenspeed_rl_kernels.checks import misfit, shapes
from tokenspeed_rl_kernels.cpu import linear_logprob as cpu
from tokenspeed_rl_kernels.registry import op, runs_triton


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A shape to test."""

    name: str
    tokens: int
    hidden: int
    vocab: int
    bias: bool = False
    temperature: float = 1.0


CASES = (
    Case(name="one token", tokens=1, hidden=32, vocab=100),
    Case(name="no tokens", tokens=0, hidden=32, vocab=100),
    Case(name="odd", tokens=7, hidden=37, vocab=211, bias=True, temperature=0.7),
    Case(name="more tokens than a block", tokens=131, hidden=24, vocab=61, temperature=2.0),
    Case(name="wide vocabulary", tokens=3, hidden=16, vocab=2500, bias=True),
)


def linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Logprob of each target and entropy (nats) of softmax((h W^T + b) / temperature).

    Differentiable, once, in hidden, weight and bias, by either result. Logits are never rounded to the
    inputs' dtype, and autocast has no say: cast the arguments yourself.

    Args:
        hidden: [T, H].
        weight: [V, H], of hidden's dtype.
        targets: [T] int64, in [0, V). On a GPU nobody can look at them without waiting for it: there the
            logprob of any other target is NaN, and its entropy what it is.
        bias: [V], of hidden's dtype. -inf takes a token out of the distribution.
        temperature: positive; that of the rollout.

    Returns:
        logprob and entropy, [T], in float32 or wider.

    Raises:
        ValueError: shapes or dtypes misfit, the temperature isn't positive, or, on a CPU, a target is out of
            range.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        got = shapes(hidden=hidden, weight=weight)
        raise misfit("shapes misfit", got, "pass hidden [T, H] and weight [V, H]")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise misfit("shapes misfit", shapes(weight=weight, bias=bias), "pass bias [V]")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise misfit("targets misfit", f"{shapes(targets=targets)} {targets.dtype}", "pass targets [T] int64")
    dtypes = [t.dtype for t in (hidden, weight, bias) if t is not None]
    if len(set(dtypes)) > 1:
        raise misfit("dtypes differ", dtypes, "use one dtype")
    if not 0 < temperature < math.inf:
        raise misfit("temperature must be positive", temperature, "pass that of the rollout")
    results: tuple[Tensor, Tensor] = _LinearLogprob.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, float(temperature)
    )
    return results


class _LinearLogprob(torch.autograd.Function):
    """The derivative of two ops that have none."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(hidden.device.type, enabled=False):
            logprob, entropy, normaliser = linear_logprob_forward(hidden, weight, bias, targets, temperature)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy)
        ctx.temperature = temperature
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        base = grad_logprob + grad_entropy * entropy
        rows = torch.stack((*normaliser, grad_logprob, grad_entropy, base))
        wanted = list(ctx.needs_input_grad[:3])
        with torch.autocast(rows.device.type, enabled=False):
            grads = linear_logprob_backward(hidden, weight, bias, targets, rows, ctx.temperature, wanted)
        return (*(grad if want else None for grad, want in zip(grads, wanted, strict=True)), None, None)


def _forward_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, dtype = hidden.shape[0], torch.promote_types(hidden.dtype, torch.float32)
    logprob, entropy = (hidden.new_empty(tokens, dtype=dtype) for _ in range(2))
    return logprob, entropy, hidden.new_empty(2, tokens, dtype=dtype)


@op(_forward_fake)
def linear_logprob_forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob [T], entropy [T], normaliser [2, T]) of arguments that fit.

    The normaliser is m, the largest z, and log sum_j exp(z_j - m): apart, so that log p, which is z less
    both, is exact for large z too.
    """
    if runs_triton(hidden):
        from tokenspeed_rl_kernels.gpu import linear_logprob as gpu

        return gpu.forward(hidden, weight, bias, targets, temperature)
    misfits = targets[(targets < 0) | (targets >= len(weight))]
    if len(misfits):
        raise misfit("target out of range", int(misfits[0]), f"pass targets in [0, {len(weight)})")
    return cpu.forward(hidden, weight, bias, targets, temperature)


def _backward_fake(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    rows: Tensor,
    temperature: float,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = hidden.shape, weight.shape, weight.shape[:1]
    grads = (hidden.new_empty(size if want else (0,)) for size, want in zip(sizes, wanted, strict=True))
    grad_hidden, grad_weight, grad_bias = grads
    return grad_hidden, grad_weight, grad_bias


@op(_backward_fake)
def linear_logprob_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    rows: Tensor,
    temperature: float,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias; those not wanted are [0].

    `rows` [5, T]: both of the normaliser, the gradients g of logprob and e of entropy, and
    a = g + e * entropy. Then that of z_j is g [j = target] - p_j (a + e log p_j).
    """
    if runs_triton(hidden):
        from tokenspeed_rl_kernels.gpu import linear_logprob as gpu

        return gpu.backward(hidden, weight, bias, targets, rows, temperature, wanted)
    return cpu.backward(hidden, weight, bias, targets, rows, temperature, wanted)


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """`linear_logprob`, from all logits at once in float32 or wider; differentiable."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    z = hidden.to(wide) @ weight.to(wide).t() + (0 if bias is None else bias.to(wide))
    rows = torch.log_softmax(z / temperature, 1)
    possible = rows.masked_fill(rows == -torch.inf, 0.0)
    return rows.gather(1, targets.unsqueeze(1)).squeeze(1), -(rows.exp() * possible).sum(1)
