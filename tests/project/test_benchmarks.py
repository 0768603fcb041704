"""Benchmarks run: with a tiny model and few rounds, so that they don't rot."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 100.0


def run(script: str, *arguments: str) -> list[str]:
    """The lines of a benchmark that ends well."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), "--model", "tiny", "--threads", "1", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
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
