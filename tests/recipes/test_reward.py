"""`reward=model`: rollouts scored by a reward model in a second engine of the process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
    Qwen3Config,
)

from tests.heads import EXACT, Heads
from tests.tiny import Tiny
from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.recipes import ppo as recipe
from tokenspeed_rl.recipes.ppo import PPORecipe
from tokenspeed_rl.recipes.reward import ModelReward, VerifierReward
from tokenspeed_rl.recipes.run import Run
from tokenspeed_rl.recipes.settings import parse
from tokenspeed_rl.recipes.task import Task
from tokenspeed_rl.rl.trajectory import TrajectoryBatch

Composer = Callable[..., Any]
PPOMaker = Callable[..., PPORecipe]


def save(folder: Path, policy: Any, *, token: bool = False, **changes: Any) -> PreTrainedModel:
    """A random scoring model over the policy's vocabulary, and the policy's tokenizer beside it."""
    model, tokenizer = policy
    options = {**model.config.to_dict(), "num_labels": 1, "initializer_range": 0.3, **changes}
    auto = AutoModelForTokenClassification if token else AutoModelForSequenceClassification
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        scorer = auto.from_config(Qwen3Config.from_dict(options)).eval()
    scorer.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return scorer


@pytest.mark.parametrize("backup", ["cpu", "none"])
def test_a_run_learns_from_the_model(
    small_ppo: PPOMaker, policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backup: str
) -> None:
    """Issue 4, item 2: PPO runs; every reward of every step is transformers' score of that sequence; what is
    right is still the verifier's word."""
    scorer = save(tmp_path / "rewards", policy)
    cfg = small_ppo(
        "reward=model",
        f"reward.path={tmp_path / 'rewards'}",
        f"reward.engine.weights_backup={backup}",
        f"folder={tmp_path / 'run'}",
    )
    batches: list[TrajectoryBatch] = []
    log_rollout = Run.log_rollout

    def keep(self: Run, step: int, batch: TrajectoryBatch, *args: Any, **kwargs: Any) -> None:
        batches.append(batch)
        log_rollout(self, step, batch, *args, **kwargs)

    monkeypatch.setattr(Run, "log_rollout", keep)
    recipe.train(cfg)
    assert len(batches) == cfg.trainer.steps == 2
    for batch in batches:
        for sample, reward in zip(batch.samples, batch.rewards.tolist(), strict=True):
            expected = Heads.expected(scorer, [*sample.prompt_ids, *sample.output_ids]).item()
            assert reward == pytest.approx(expected, abs=EXACT)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for row, batch in zip(rows, batches, strict=True):
        assert row["reward"] == pytest.approx(batch.rewards.mean().item())
        assert 0.0 <= row["right"] <= 1.0


@pytest.mark.parametrize("backup", ["cpu", "none"])
def test_it_sleeps_but_where_it_scores(policy: Any, task: Task, tmp_path: Path, backup: str) -> None:
    """The reward model's engine gives its memory back between phases; without a backup its weights stay."""
    save(tmp_path, policy)
    cfg = ModelReward(path=str(tmp_path))
    assert cfg.engine.weights_backup == "cpu"
    cfg.engine.weights_backup = backup
    with cfg.open(task, policy[1]) as source:
        client = source.reward.client  # type: ignore[union-attr]
        tags = {"kv_cache", "cuda_graph"} | ({"weights"} if backup == "cpu" else set())
        for _ in range(2):
            assert set(client.asleep()) == tags
            with source.resident():
                assert not client.asleep()
    assert client.gracefully_exit
    with VerifierReward().open(task, policy[1]) as source, source.resident():
        assert source.reward == task.reward and source.metrics([]) == {}


def test_other_models_are_refused_when_composed(composer: Composer, policy: Any, tmp_path: Path) -> None:
    """H14, issue 4 item 2: a value model, a causal LM, several scores, or nothing: one line, by name."""
    save(tmp_path / "values", policy, token=True)
    save(tmp_path / "two", policy, num_labels=2)
    policy[0].save_pretrained(tmp_path / "causal")
    AutoConfig.for_model("qwen3", num_labels=1).save_pretrained(tmp_path / "unnamed")
    wrong = {
        "values": "Qwen3ForTokenClassification with 1 labels",
        "two": "Qwen3ForSequenceClassification with 2 labels",
        "causal": "Qwen3ForCausalLM",
        "unnamed": "no architecture",
        "missing": "with a config.json",
    }
    for name, words in wrong.items():
        raw = composer("ppo", "reward=model", f"reward.path={tmp_path / name}")
        with pytest.raises(SystemExit, match=f"config error: reward.path.*{words}"):
            parse(raw, PPORecipe)


def test_other_vocabularies_are_refused_at_the_start(policy: Any, task: Task, tmp_path: Path) -> None:
    """A model that would read other tokens than the policy writes: too few ids, or ids that mean others."""
    save(tmp_path / "small", policy, vocab_size=8)
    save(tmp_path / "other", policy, vocab_size=300)
    Tiny.tokenizer().save_pretrained(tmp_path / "other")
    for name, words in (("small", "8 token ids"), ("other", "other ids than the policy's")):
        with (
            pytest.raises(ConfigError, match=f"reward.path.*{words}"),
            ModelReward(path=str(tmp_path / name)).open(task, policy[1]),
        ):
            pass
