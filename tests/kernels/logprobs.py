"""Inputs of `linear_logprob`, and a loss of both its results."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_rl_kernels.linear_logprob import Case


def inputs(case: Case, dtype: torch.dtype = torch.float32) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """(hidden, weight, targets), options."""
    generator = torch.Generator().manual_seed(len(case.name))
    shapes = (case.tokens, case.hidden), (case.vocab, case.hidden), (case.vocab,)
    hidden, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    targets = torch.randint(case.vocab, (case.tokens,), generator=generator)
    options = {"bias": bias if case.bias else None, "temperature": case.temperature}
    return (hidden, weight, targets), options


def gradients(
    function: Callable[..., tuple[Tensor, Tensor]],
    arguments: tuple[Tensor, ...],
    options: dict[str, Any],
    dtype: torch.dtype,
) -> list[Tensor]:
    """Both results of the function, and the gradients of a loss of both, computed in the dtype."""
    hidden, weight, targets = arguments
    tensors = [
        None if t is None else t.to(dtype, copy=True).requires_grad_()
        for t in (hidden, weight, options["bias"])
    ]
    logprob, entropy = function(*tensors[:2], targets, bias=tensors[2], temperature=options["temperature"])
    sign = torch.linspace(-1, 2, len(targets), dtype=logprob.dtype)
    (logprob @ sign + (entropy.square() * sign).sum()).backward()
    return [logprob.detach(), entropy.detach(), *(t.grad for t in tensors if t is not None)]
