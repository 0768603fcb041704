"""What a run shows while it goes: progress bars, and above them a table with a row per step."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from tokenspeed_rl.errors import ConfigError

ROWS_PER_HEADER = 25


class Column(NamedTuple):
    """One column of the table."""

    title: str
    metric: str
    format: str = ".3f"
    """Format specification of the number."""

    @property
    def width(self) -> int:
        return max(len(self.title), 6)

    def cell(self, metrics: Mapping[str, float]) -> str:
        """The number, right-aligned; a dash where `metrics` lacks it."""
        value = metrics.get(self.metric)
        return ("-" if value is None else format(value, self.format)).rjust(self.width)


class Display:
    """A context manager around a loop of steps. Writes to the terminal, or plain lines where there is none.

    Needs the package `rich` (the `train` extra). Use it from one thread.
    """

    def __init__(self, columns: Sequence[Column] = (), *, console: Any = None) -> None:
        """`console`: a rich Console; None: one on standard output."""
        try:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )
        except ImportError as error:
            raise ConfigError(
                "a display needs the package rich", fix="pip install 'tokenspeed_rl[train]'"
            ) from error
        self.columns = tuple(columns)
        self._rows = 0
        self._running = False
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console or Console(highlight=False),
            refresh_per_second=4,
        )

    def bar(self, description: str, total: int | None) -> "Bar":
        """A new progress bar, below the others; `total=None` where it isn't known."""
        return Bar(self._progress, self._progress.add_task(description, total=total, note=""))

    def row(self, metrics: Mapping[str, float]) -> None:
        """One row of the table; its header comes again every 25 rows."""
        if self._rows % ROWS_PER_HEADER == 0:
            self.line("  ".join(column.title.rjust(column.width) for column in self.columns))
        self._rows += 1
        self.line("  ".join(column.cell(metrics) for column in self.columns))

    def line(self, text: str = "") -> None:
        """Text above the bars, as it is: no markup, no wrapping."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        """Leaves the bars as they are; what `line` writes from now on comes below. Idempotent."""
        if self._running:
            self._running = False
            self._progress.stop()

    def __enter__(self) -> Self:
        self._running = True
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Bar:
    """One progress bar of a display."""

    def __init__(self, progress: Any, task: Any) -> None:
        self._progress = progress
        self._task = task

    def advance(self, note: str = "") -> None:
        """One step done; `note` stands behind the bar."""
        self._progress.update(self._task, advance=1, note=note)
