"""Draws and logprobs: of a step, and the trainer's."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpu_suite.checks.verdicts import Checks
from gpu_suite.machine import Machine
from tokenspeed_rl_kernels import linear_logprob, sample


def check(machine: Machine, checks: Checks) -> None:
    """Both."""
    with checks.trial("sample"):
        _draws(machine, checks)
    with checks.trial("linear_logprob"):
        _scores(machine, checks)


def _draws(machine: Machine, checks: Checks) -> None:
    """Every mixture of settings: tokens are those that the CPU draws, logprobs right."""
    rows, vocab = (8, 1000) if machine.dry else (64, 151936)
    number = torch.arange(rows)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 3
    given = {
        "temperature": (number % 4) * 0.4,
        "top_k": torch.where(number % 3 == 0, 50, 0),
        "top_p": torch.where(number % 5 == 1, 0.9, 1.0),
        "min_p": torch.where(number % 7 == 2, 0.05, 0.0),
        "seeds": number * 2**40 - 7,
        "positions": number + 1,
    }

    def drawn(rows: slice, device: torch.device) -> tuple[Tensor, ...]:
        return sample(logits[rows].to(device), *(x[rows].to(device) for x in given.values()))

    ours, cpus = drawn(slice(None), machine.device), drawn(slice(None), torch.device("cpu"))
    checks.equal("sample: the CPU's draws", ours[0].cpu(), cpus[0], promised=True)
    heat = torch.where(given["temperature"] == 0, 1.0, given["temperature"]).double().unsqueeze(1)
    token = cpus[0].unsqueeze(1)
    names, largest = ("raw", "sampling"), float(logits.abs().max()) * 2.5  # at the lowest temperature
    for name, divisor, mine in zip(names, (torch.ones_like(heat), heat), ours[1:3], strict=True):
        torchs = (logits / divisor.float()).log_softmax(1).gather(1, token).squeeze(1)
        true = (logits.double() / divisor).log_softmax(1).gather(1, token).squeeze(1)
        checks.exact(f"sample: {name} logprob", mine, torchs, true, largest)
    checks.exact("sample: processed logprob, as the CPU's", ours[3], cpus[3], cpus[3], largest)
    alone = zip(*(drawn(slice(i, i + 1), machine.device) for i in range(rows)), strict=True)
    parts = ("tokens", "raw", "sampling", "processed")
    for name, together, each in zip(parts, ours, alone, strict=True):
        checks.equal(f"sample, rows alone and together: {name}", together, torch.cat(each))


def _scores(machine: Machine, checks: Checks) -> None:
    """Logprobs, entropies and gradients, against all logits at once in float64."""
    tokens, hidden, vocab = (7, 32, 500) if machine.dry else (300, 896, 151936)
    given = machine.random(tokens, hidden), machine.random(vocab, hidden, seed=2, scale=0.1)
    targets = torch.arange(tokens, device=machine.device) * 3
    heat = 0.7

    def ours(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return linear_logprob(x, weight, targets, temperature=heat)

    def dense(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        log = (x @ weight.t()).to(wide).div(heat).log_softmax(1)
        return log.gather(1, targets.unsqueeze(1)).squeeze(1), -(log.exp() * log).sum(1)

    def results(function: Callable[..., Any], dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in given]
        logprob, entropy = function(*leaves)
        (logprob.sum() + 0.1 * entropy.sum()).backward()
        return logprob.detach(), entropy.detach(), *(leaf.grad for leaf in leaves)

    mine, torchs = results(ours, given[0].dtype), results(dense, given[0].dtype)
    true = results(dense, torch.float64)
    names = ("logprob", "entropy", "gradient of the states", "gradient of the weight")
    for name, *three in zip(names, mine, torchs, true, strict=True):
        checks.exact(f"linear_logprob: {name}", *three)
