"""SFT: the warm start alone, and the control that goes on imitating."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.recipes.sft import SFTRecipe, train

SFTMaker = Callable[..., SFTRecipe]


def test_warm_start(small_sft: SFTMaker, tmp_path: Path) -> None:
    """Accuracy is measured before and after; the loss is logged and falls; a checkpoint is left."""
    summary = train(small_sft(f"folder={tmp_path}", "imitation.steps=50", "imitation.lr=5e-3"))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [25, 50]
    assert rows[1]["loss"] < rows[0]["loss"]
    assert summary["greedy_accuracy"][0] == 0.0
    assert summary["wrong_demonstrations"] == pytest.approx(0.6, abs=0.05)
    assert (tmp_path / "checkpoint" / "config.json").is_file()
    assert "tokens_per_second" not in summary


def test_control_goes_on(small_sft: SFTMaker, tmp_path: Path) -> None:
    """The control takes the warm start's steps, then more of the same for the time given."""
    train(small_sft(f"folder={tmp_path}", "imitation.steps=25", "control_seconds=2"))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["step"] == 25
    assert rows[-1]["step"] > 25


def test_control_takes_as_long_as_ppo(small_sft: SFTMaker, tmp_path: Path) -> None:
    """`same_time_as` a finished run means as many seconds as that one was learning; no run, a clear error."""
    (tmp_path / "summary.json").write_text('{"seconds_learning": 12.5}')
    assert small_sft(f"same_time_as={tmp_path}").control_seconds == 12.5
    with pytest.raises(ConfigError, match="finished PPO run"):
        SFTRecipe(same_time_as=str(tmp_path / "none")).validate()
