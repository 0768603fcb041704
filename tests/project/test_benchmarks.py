"""Benchmarks run: with a tiny model and few rounds, so that they don't rot."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 100.0
SUITE_LIMIT = 240.0
"""It takes 25 s where nothing else runs."""


def start(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A benchmark that has ended, on one thread."""
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *arguments],
        capture_output=True,
        text=True,
        timeout=SUITE_LIMIT if script == "gpu_suite.py" else LIMIT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def run(script: str, *arguments: str) -> list[str]:
    """The lines of a benchmark that ends well."""
    done = start(script, "--model", "tiny", "--threads", "1", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_weight_sync() -> None:
    """D9: one row for each way an update takes, its checksum compared; sharing copies nothing, others all."""
    lines = run("weight_sync.py", "--rounds", "1")
    start = next(at for at, line in enumerate(lines) if line.startswith("path "))
    rows = {line[:40].split("  ")[0]: line.split() for line in lines[start + 1 :]}
    assert "checksums agree on every path" in lines[start - 1]
    copied = {name: row[-3] for name, row in rows.items()}
    assert copied.pop("shared") == "0"
    assert len(copied) == 10 and set(copied.values()) == {copied["copy_"]} != {"0"}
    assert all(float(row[-2].rstrip("x")) > 0 for row in rows.values())


def test_sleep_wake() -> None:
    """A6: the memory of a cache goes back to the system, cycle for cycle, in each of three ways."""
    lines = run("sleep_wake.py", "--cycles", "2", "--kv-tokens", "16384")
    start = next(at for at, line in enumerate(lines) if line.startswith("release and resume"))
    rows = lines[start + 1 :]
    assert [row.split("  ")[0] for row in rows] == [
        "all, weights not saved",
        "all, weights saved",
        "kv_cache alone",
    ]
    for row in rows:
        returned = float(row.split()[-6])
        assert 7 < returned < 12, row  # 16,384 tokens of 512 bytes are 8.4 MB


def test_step_profile(tmp_path: Path) -> None:
    """The profiles of ten steps are cut into kinds of work that make up the whole: a table and a picture."""
    picture = tmp_path / "step.png"
    lines = run("step_profile.py", "--picture", str(picture))
    start = next(at for at, line in enumerate(lines) if line.startswith("kind of work"))
    assert lines[start - 1] == "5 prefill steps of 4 x 128 tokens, 5 decode steps of 32"
    rows = {line[:16].strip(): [float(cell) for cell in line[16:].split()] for line in lines[start + 1 :]}
    for share in zip(*rows.values(), strict=True):
        assert abs(sum(share) - 100) < 0.5 and all(each >= 0 for each in share)
    assert all(min(rows[kind]) > 0 for kind in ("MLP", "projections", "attention", "norms", "sampling"))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(2 * SUITE_LIMIT)
def test_gpu_suite(tmp_path: Path) -> None:
    """What a GPU will run works in toy shapes on the CPU, section by section, and goes on where it was."""
    out = ("--dry-run", "--out", str(tmp_path))
    done = start("gpu_suite.py", *out)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((tmp_path / "results.json").read_text())
    sections = kept["sections"]
    assert list(sections) == ["bandwidth", "correct", "graphs", "steps", "ops", "train", "engine"]
    assert {section["status"] for section in sections.values()} == {"ok"}
    found = {name: section["found"] for name, section in sections.items()}
    assert not any("problem" in run for run in found["engine"]["runs"]), "transformers' serves here too"
    assert {run["who"] for run in found["engine"]["runs"]} == {"engine", "transformers"}
    assert len(found["correct"]["checks"]) > 50 and len(found["graphs"]["stages"]) == 8
    assert {step["graphs"] for step in found["steps"]["steps"]} == {True, False}
    for line in (*found["steps"]["steps"], *found["ops"]["ops"]):
        assert line["seconds"] > 0, line

    del sections["train"]
    (tmp_path / "results.json").write_text(json.dumps({**kept, "sections": sections}))
    late = start("gpu_suite.py", *out, "--resume", "--only", "bandwidth,train", "--minutes", "0")
    assert late.returncode == 1 and "bandwidth: " not in late.stdout and "train: no time" in late.stdout
