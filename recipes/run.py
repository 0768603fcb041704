"""One run of a recipe: its folder, what it shows, and the summary it ends with."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from omegaconf import OmegaConf

from tokenspeed_rl.display import Bar, Column, Display
from tokenspeed_rl.recipes.accuracy import Accuracy
from tokenspeed_rl.rl.trajectory import TrajectoryBatch
from tokenspeed_rl.tracking import Tracker

SHOWN = 5
RECORDED = 20
SHARES = ("greedy_accuracy", "sampled_accuracy", "share_", "wrong_")


def drawn(batch: TrajectoryBatch) -> list[tuple[str, str, float]]:
    """(question, response, reward) of each sample of a rollout of problems."""
    rewards = batch.rewards.tolist()
    return [(s.prompt.question, s.text, reward) for s, reward in zip(batch.samples, rewards, strict=True)]


def shown(value: float | list[float], *, share: bool) -> str:
    """A number of a summary, shares in percent; a pair is before -> after."""
    if isinstance(value, list):
        return " -> ".join(shown(each, share=share) for each in value)
    return f"{value:.1%}" if share else f"{value:,.0f}"


class Run:
    """A context manager around a whole recipe. Leaves in `folder` what `Tracker` does, config and summary."""

    def __init__(self, config: Any, folder: str, *, columns: Sequence[Column], curves: Sequence[str]) -> None:
        """`config`: the settings, written as config.yaml; `curves`: the metrics that curve.png shows."""
        self.folder = Path(folder)
        self.tracker = Tracker(self.folder)
        self.display = Display(columns)
        self.curves = curves
        self.tokens = 0
        self.seconds = {"generate": 0.0, "score": 0.0, "train": 0.0}
        self._started = time.perf_counter()
        OmegaConf.save(OmegaConf.structured(config), self.folder / "config.yaml", resolve=True)

    def bar(self, description: str, total: int | None) -> Bar:
        """A progress bar."""
        return self.display.bar(description, total)

    def say(self, text: str) -> None:
        """A line above the bars."""
        self.display.line(text)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """A row of the table, a line of metrics.jsonl, TensorBoard events."""
        self.tracker.log(step, metrics)
        self.display.row({"step": step, **metrics})

    def log_rollout(
        self, step: int, batch: TrajectoryBatch, metrics: Mapping[str, float], *, train: float
    ) -> None:
        """`log` of a step that drew `batch`, trained on it for `train` seconds, and measured `metrics`."""
        seconds = {**batch.seconds, "train": train}
        tokens = sum(len(sample.output_ids) for sample in batch.samples)
        scored = batch.rewards[~batch.rewards.isnan()]
        self.tokens += tokens
        for phase, spent in seconds.items():
            self.seconds[phase] += spent
        self.log(
            step,
            {
                "reward": scored.mean().item(),
                "right": (scored >= 1.0).float().mean().item(),
                **metrics,
                "length": tokens / len(batch),
                "truncated": batch.truncated.float().mean().item(),
                "tokens_per_second": tokens / seconds["generate"],
                **{f"seconds_{phase}": spent for phase, spent in seconds.items()},
            },
        )

    def samples(self, title: str, rows: Sequence[tuple[str, str, float]]) -> None:
        """Some of (prompt, response, score): a few on the screen, more in samples.md."""
        self.tracker.samples(title, rows[:RECORDED])
        self.say(f"{title}:")
        for prompt, response, score in rows[:SHOWN]:
            self.say(f"  {score:.2f}  {' '.join(prompt.split())[-60:]} -> {' '.join(response.split())[:100]}")

    def save(self, model: Any, tokenizer: Any) -> None:
        """The folder's `checkpoint`, which `AutoModelForCausalLM` and `AutoTokenizer` load."""
        model.save_pretrained(self.folder / "checkpoint")
        tokenizer.save_pretrained(self.folder / "checkpoint")

    def finish(
        self, before: Accuracy, after: Accuracy, *, facts: Mapping[str, float | list[float]]
    ) -> dict[str, Any]:
        """Writes curve.png and summary.json, shows and returns the summary, which begins with `facts`."""
        summary: dict[str, Any] = {
            **facts,
            "greedy_accuracy": [before.greedy, after.greedy],
            "sampled_accuracy": [before.sampled, after.sampled],
        }
        if self.tokens:
            learning = sum(self.seconds.values())
            summary["tokens_per_second"] = self.tokens / self.seconds["generate"]
            summary["share_of_time_generating"] = self.seconds["generate"] / learning
            summary["seconds_learning"] = learning
        summary["seconds"] = time.perf_counter() - self._started
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        if self.tracker.history:
            self.tracker.plot(self.curves, title=self.folder.name)
        self.display.stop()
        for name, value in summary.items():
            self.say(f"{name.replace('_', ' ')}: {shown(value, share=name.startswith(SHARES))}")
        self.say(f"written: {self.folder}")
        return summary

    def __enter__(self) -> Self:
        self.display.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.display.__exit__(kind, error, trace)
        self.tracker.close()
