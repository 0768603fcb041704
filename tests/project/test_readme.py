"""The README's promises, kept by running them."""

import ast
import dataclasses
import itertools
import re
from pathlib import Path

import pytest

from tokenspeed_rl import EngineConfig

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    "page", ["README.md", "docs/weights.md", "docs/experts.md", "docs/watching.md", "docs/requests.md"]
)
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever pastes a page's Python, block after block, gets what it shows."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)


def test_every_setting_is_listed_as_it_is() -> None:
    """docs/settings.md says what each field's own docstring says, as `help` can't show those."""
    source = ast.parse((ROOT / "tokenspeed_rl" / "config.py").read_text())
    (config,) = (n for n in source.body if isinstance(n, ast.ClassDef) and n.name == "EngineConfig")
    said = {
        field.target.id: " ".join(ast.literal_eval(text.value).split())
        for field, text in itertools.pairwise(config.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
    }
    defaults = {each.name: repr(each.default).replace("'", '"') for each in dataclasses.fields(EngineConfig)}
    rows = [
        f"| `{name}` | `{default}` | {said[name]} |".replace("<", "\\<") for name, default in defaults.items()
    ]
    listed = (ROOT / "docs" / "settings.md").read_text().splitlines()
    assert [line for line in listed if line.startswith("| `")] == rows


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
