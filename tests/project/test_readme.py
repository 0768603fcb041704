"""The README's promises, kept by running them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", ["README.md", "docs/weights.md", "docs/experts.md", "docs/watching.md"])
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever pastes a page's Python, block after block, gets what it shows."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)


def test_no_figure_is_left_open() -> None:
    """Tables and figures of README and docs are filled in."""
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        assert not re.findall(r"^[A-Z0-9]+_[A-Z]+$", page.read_text(), re.M), page


def test_make_targets_and_paths_exist() -> None:
    """Every `make` target and every file of the project that the README names is there."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"\bmake ([a-z-]+)", README)) <= targets
    named = re.findall(
        r"`((?:benchmarks|configs|docs|kernels|recipes|tests|tokenspeed_rl)/[\w./-]*)`", README
    )
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", README)
    assert [path for path in named + links if not (ROOT / path).exists()] == []
