"""What a run leaves and shows: files other tools read, and a table that lines up."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tokenspeed_rl.display import ROWS_PER_HEADER, Column, Display
from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.tracking import Tracker, plot_curves


def test_metrics_are_there_as_they_come(tmp_path: Path) -> None:
    """Each step is on the disk once logged, as valid JSON, NaN or not; TensorBoard sees the same numbers."""
    with Tracker(tmp_path) as tracker:
        tracker.log(1, {"reward": 0.25, "kl": float("nan")})
        assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "reward": 0.25, "kl": None}
        tracker.log(5, {"reward": 0.5})
        with pytest.raises(ConfigError, match="step"):
            tracker.log(5, {"reward": 0.5})
    tracker.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 0.25), (5, 0.5)]


def test_a_second_run_replaces_the_first(tmp_path: Path) -> None:
    """Numbers of two runs are never mixed in one folder; files of others stay."""
    (tmp_path / "notes.txt").write_text("mine")
    for value in (1.0, 2.0):
        with Tracker(tmp_path) as tracker:
            tracker.log(1, {"reward": value})
            tracker.samples("first", [("q", "a", value)])
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["reward"] == 2.0
    assert (tmp_path / "samples.md").read_text().count("## first") == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_samples_stay_one_table(tmp_path: Path) -> None:
    """Line breaks, bars and backticks of a response don't break the Markdown table."""
    with Tracker(tmp_path) as tracker:
        tracker.samples("step 1", [("a|b", "x\ny `z`", 0.5), ("q", " ", 0.0)])
    lines = (tmp_path / "samples.md").read_text().splitlines()
    assert lines[4] == "| 0.50 | `a\\|b` | `x⏎y 'z'` |"
    assert lines[5] == "| 0.00 | `q` | (nothing) |"


def test_curves(tmp_path: Path) -> None:
    """A PNG of the metrics that were logged; names that weren't are left out, and none at all is an error."""
    history = [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0, "b": 0.5}, {"step": 3, "a": 1.5}]
    plot_curves(history, ["a", "b", "c"], tmp_path / "some.png", title="run")
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="no metric"):
        plot_curves(history, ["c"], tmp_path / "none.png")


def test_the_table_lines_up() -> None:
    """Numbers stand under their titles, a missing one is a dash, and long tables repeat the header."""
    out = io.StringIO()
    columns = (Column("step", "step", ".0f"), Column("a long title", "x"))
    with Display(columns, console=Console(file=out, width=60)) as display:
        for step in range(ROWS_PER_HEADER + 1):
            display.row({"step": step, "x": 0.5} if step else {"step": step})
    lines = out.getvalue().splitlines()
    assert lines[0] == "  step  a long title"
    assert lines[1] == "     0             -"
    assert lines[2] == "     1         0.500"
    assert [at for at, line in enumerate(lines) if line == lines[0]] == [0, ROWS_PER_HEADER + 1]


def test_lines_are_not_wrapped_nor_read_as_markup() -> None:
    """Completions appear as they are, however long, brackets and all; the bar shows its count and note."""
    out = io.StringIO()
    with Display(console=Console(file=out, width=60)) as display:
        bar = display.bar("steps", 2)
        display.line("[bold]" + "x" * 100)
        bar.advance("loss 1.5")
    text = out.getvalue()
    assert "[bold]" + "x" * 100 in text
    assert "1/2" in text and "loss 1.5" in text


def test_what_comes_after_stop_is_below_the_bars() -> None:
    """A run ends with its summary, not with its bars."""
    out = io.StringIO()
    with Display(console=Console(file=out, width=60)) as display:
        display.bar("steps", 1).advance()
        display.stop()
        display.line("the end")
    assert out.getvalue().rstrip().endswith("the end")
