"""What a run leaves behind: metrics.jsonl, TensorBoard events, sample completions, curves."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tokenspeed_rl.errors import ConfigError


class Tracker:
    """Writes the numbers of one run into one folder, as they come. A context manager; not thread-safe.

    An earlier run's metrics, events and samples in the folder are replaced. Needs the packages `tensorboard`
    and, for `plot`, `matplotlib` (the `train` extra).
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.history: list[dict[str, float]] = []
        self.folder.mkdir(parents=True, exist_ok=True)
        for events in self.folder.glob("events.out.tfevents.*"):
            events.unlink()
        (self.folder / "samples.md").unlink(missing_ok=True)
        self._lines = (self.folder / "metrics.jsonl").open("w", encoding="utf-8")
        self._events = summary_writer(self.folder)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics.jsonl and one event per number. Steps only grow; NaN becomes null."""
        if self.history and step <= self.history[-1]["step"]:
            raise ConfigError("step must be larger than the last one logged", got=step)
        row = {"step": step, **metrics}
        self.history.append(row)
        json.dump({name: x if math.isfinite(x) else None for name, x in row.items()}, self._lines)
        self._lines.write("\n")
        self._lines.flush()
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)

    def samples(self, title: str, rows: Sequence[tuple[str, str, float]]) -> None:
        """Appends a section of (prompt, response, score) to samples.md."""
        with (self.folder / "samples.md").open("a", encoding="utf-8") as file:
            file.write(f"## {title}\n\n| score | prompt | response |\n|---:|---|---|\n")
            for prompt, response, score in rows:
                file.write(f"| {score:.2f} | {code(prompt)} | {code(response)} |\n")
            file.write("\n")

    def plot(self, names: Sequence[str], *, title: str) -> Path:
        """curve.png: one small plot over the steps for each metric in `names` that was logged."""
        path = self.folder / "curve.png"
        plot_curves(self.history, names, path, title=title)
        return path

    def close(self) -> None:
        """Flushes and closes the files; a second call does nothing."""
        self._events.close()
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def summary_writer(folder: Path) -> Any:
    """A TensorBoard writer on `folder`; ConfigError without the package."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "tracking needs the package tensorboard", fix="pip install 'tokenspeed_rl[train]'"
        ) from error
    return SummaryWriter(str(folder))


def plot_curves(
    history: Sequence[Mapping[str, float]], names: Sequence[str], path: Path | str, *, title: str = ""
) -> None:
    """A PNG with one plot over `step` for each of `names` that `history` holds, two in a row.

    `history`: rows as in metrics.jsonl, each with a `step`. Draws on a figure of its own: matplotlib's global
    state and backend stay as they are.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "plots need the package matplotlib", fix="pip install 'tokenspeed_rl[train]'"
        ) from error
    names = [name for name in names if any(name in row for row in history)]
    if not names:
        raise ConfigError("no metric to plot", got=sorted({name for row in history for name in row}))
    rows = math.ceil(len(names) / 2)
    figure = Figure(figsize=(10.0, 2.6 * rows + 0.4), layout="constrained")
    figure.suptitle(title)
    for axes, name in zip(
        figure.subplots(rows, 2, squeeze=False).flat, [*names, *[""] * (2 * rows - len(names))], strict=True
    ):
        if not name:
            axes.set_axis_off()
            continue
        points = [(row["step"], row[name]) for row in history if row.get(name) is not None]
        axes.plot(
            *zip(*points, strict=True),
            color="#1f5fa8",
            linewidth=1.8,
            marker="o" if len(points) < 3 else None,
        )
        axes.set_title(name.replace("_", " "), fontsize=10, loc="left")
        axes.set_xlabel("step", fontsize=8)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def code(text: str) -> str:
    """`text` as one code span in a Markdown table cell."""
    shown = text.replace("\n", "⏎").replace("|", "\\|").replace("`", "'")
    return f"`{shown}`" if shown.strip() else "(nothing)"
