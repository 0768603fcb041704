"""`watch` calls back after every step that really stepped, and after no other."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.weights import watch


def backward(model) -> None:
    model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}])
def test_called_after_the_write_until_removed(options):
    """E13: fused and foreach steps too; the callback sees the new values; `remove` ends it."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, **options)
    seen = []
    handle = watch(optimizer, lambda: seen.append(model.weight.detach().clone()))
    before = model.weight.detach().clone()
    backward(model)
    optimizer.step()
    assert len(seen) == 1 and torch.equal(seen[0], model.weight) and not torch.equal(seen[0], before)
    optimizer.zero_grad()
    handle.remove()
    optimizer.step()
    assert len(seen) == 1


def test_two_watchers_and_a_scheduler():
    """Two engines may watch one optimizer; a scheduler that wraps `step` changes nothing here."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    seen = []
    watch(optimizer, lambda: seen.append("a"))
    watch(optimizer, lambda: seen.append("b"))
    backward(model)
    optimizer.step()
    scheduler.step()
    assert seen == ["a", "b"]


def test_steps_that_accelerate_skips_do_not_count():
    """E13: under gradient accumulation the wrapped optimizer steps every second time only."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.5))
    seen = []
    watch(optimizer, lambda: seen.append(1))
    counts = []
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
        counts.append(len(seen))
    assert counts == [0, 1, 1, 2]


def test_the_callbacks_error_reaches_the_trainer():
    """E13: what weights_changed raises comes out of `step()`, which has stepped by then."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def fail() -> None:
        raise ConfigError("the module has a hook")

    watch(optimizer, fail)
    before = model.weight.detach().clone()
    backward(model)
    with pytest.raises(ConfigError, match="hook"):
        optimizer.step()
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("other", [None, nn.Linear(2, 1), "adam"])
def test_anything_else_is_refused(other):
    """What is no torch optimizer may write parameters after its step: refused, with the way out."""
    with pytest.raises(ConfigError, match="weights_changed"):
        watch(other, lambda: None)
