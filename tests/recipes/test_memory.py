"""What a recipe says about memory is what the process holds; between its phases the engine has none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tokenspeed_rl import Engine
from tokenspeed_rl.recipes import memory, ppo
from tokenspeed_rl.recipes.memory import MB, MemoryUse, held, peak, reset_peak
from tokenspeed_rl.rl.trajectory import TrajectoryBatch

BLOCK = 96
SLACK = 16
"""Megabytes; a process takes some for itself."""


def block() -> torch.Tensor:
    """A tensor of `BLOCK` megabytes, every byte written."""
    return torch.ones(BLOCK * 250_000)


def test_what_is_held() -> None:
    """Anonymous memory comes and goes with a tensor of 96 MB, and its peak stays until it is reset."""
    reset_peak()
    before = held()
    tensor = block()
    assert held() - before == pytest.approx(BLOCK * MB, abs=SLACK * MB)
    del tensor
    assert held() - before < SLACK * MB
    assert peak() - before == pytest.approx(BLOCK * MB, abs=SLACK * MB)
    reset_peak()
    assert peak() - before < SLACK * MB


def test_a_phase_has_a_peak() -> None:
    """It is that of the phase alone, and the highest of all phases of one name."""
    use, before = MemoryUse(), held()
    for sizes in ((), (1,), ()):
        with use.phase("training"):
            for _ in sizes:
                block()
    with use.phase("other"):
        pass
    assert use.peaks["training"] - before == pytest.approx(BLOCK * MB, abs=SLACK * MB)
    assert use.peaks["other"] - before < SLACK * MB
    assert use.facts()["peak_megabytes_training"] == use.peaks["training"] / MB


def test_elsewhere_than_on_linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the kernel's files a recipe runs all the same, and its figures are 0."""
    monkeypatch.setattr(memory, "STATUS", tmp_path / "status")
    monkeypatch.setattr(memory, "CLEAR_REFS", tmp_path / "no folder" / "clear_refs")
    use = MemoryUse()
    with use.phase("training"):
        pass
    assert use.facts() == {"peak_megabytes_training": 0.0, "megabytes_around_release": [0.0, 0.0]}


def test_the_engine_has_memory_only_to_generate(
    policy: tuple[PreTrainedModel, PreTrainedTokenizerFast],
) -> None:
    """A3: within it generates, behind it its cache is back with the system, also after an exception."""
    model, tokenizer = policy
    use = MemoryUse()
    with Engine(model, tokenizer=tokenizer, max_total_tokens=4096) as engine:
        engine.release_memory_occupation()
        with use.generating(engine.resident()):
            assert engine.memory_report()["kv_cache"]["mapped"] > 0
            engine.generate("s:abc=", {"max_new_tokens": 2})
            for layer in (*engine.client._core.kv.k, *engine.client._core.kv.v):
                layer.fill_(0.0)
            cache = engine.client._core.kv.nbytes
        assert engine.is_sleeping() and engine.memory_report()["kv_cache"]["mapped"] == 0
        before, after = use.around_release
        assert before - after == pytest.approx(cache, abs=SLACK * MB / 8)
        with pytest.raises(KeyError), use.generating(engine.resident()):
            raise KeyError
        assert engine.is_sleeping()


def test_training_has_the_memory(
    monkeypatch: pytest.MonkeyPatch, small_ppo: Callable[..., ppo.PPORecipe], tmp_path: Path
) -> None:
    """A3, D3: while PPO learns the engine sleeps, hears of every step all the same, and draws with the new
    weights after; the summary tells both peaks and what a release gives back."""
    seen: list[tuple[bool, int]] = []
    engines: list[Engine] = []
    learn = ppo.PPO.learn

    def engine_of(*args: Any, **options: Any) -> Engine:
        engines.append(Engine(*args, **options))
        return engines[-1]

    def watch_learning(self: ppo.PPO, batch: TrajectoryBatch) -> dict[str, float]:
        state = engines[-1].get_internal_state()[0]
        metrics = learn(self, batch)
        heard = engines[-1].get_internal_state()[0]["weight_epoch"] - state["weight_epoch"]
        seen.append((engines[-1].is_sleeping(), heard))
        return metrics

    monkeypatch.setattr(ppo, "Engine", engine_of)
    monkeypatch.setattr(ppo.PPO, "learn", watch_learning)
    cfg = small_ppo(f"folder={tmp_path}")
    summary = ppo.train(cfg)
    steps = cfg.trainer.epochs * -(-cfg.rollout.prompts * cfg.rollout.samples // cfg.trainer.minibatch_size)
    assert seen == [(True, steps)] * 2
    assert summary["peak_megabytes_generating"] > 50 and summary["peak_megabytes_training"] > 50
    before, after = summary["megabytes_around_release"]
    assert before >= after > 50
