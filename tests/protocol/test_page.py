"""docs/protocol.md lists every member of EngineClient with a test that is there and uses it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.protocol.test_protocol import ATTRIBUTES, PROMISED

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "protocol.md").read_text()
ROWS = [
    (re.findall(r"`(\w+)`", members), re.findall(r"`(\w+\.py)::(\w+)`", tests))
    for members, _, tests in re.findall(r"^\| (`.*?) \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
]


def test_every_member_once() -> None:
    assert sorted(member for members, _ in ROWS for member in members) == sorted({*PROMISED, *ATTRIBUTES})


@pytest.mark.parametrize(("members", "tests"), ROWS, ids=lambda each: str(each[0]))
def test_its_tests_are_there_and_use_it(members: list[str], tests: list[tuple[str, str]]) -> None:
    """One that is renamed or loses its subject is missed here; helpers of its file may make the call."""
    assert tests
    for file, name in tests:
        source = (HERE / file).read_text()
        functions = [
            node
            for node in ast.parse(source).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        assert name in {function.name for function in functions}, f"{file} has no {name}"
    used = "".join((HERE / file).read_text() for file, _ in tests)
    assert all(re.search(rf"\.{member}\b", used) for member in members)
