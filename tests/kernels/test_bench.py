"""The benchmark of the ops: that it times two ways to the same result, and says so."""

import sys
from dataclasses import replace

import pytest
import torch

import tokenspeed_rl_kernels as ops
from tokenspeed_rl_kernels.bench import __main__ as bench
from tokenspeed_rl_kernels.bench.subjects import SMOLLM2, SUBJECTS, setting

CPU = torch.device("cpu")
TINY = replace(SMOLLM2, name="tiny", hidden=24, heads=4, kv_heads=2, dim=8, intermediate=16, vocab=40)


def tiny(device=CPU, dtype=torch.float32):
    """Shapes that take no time."""
    return replace(setting(device, dtype), models=(TINY,), rows=(1, 3), context=32)


def test_every_op_is_timed():
    """No op without a figure."""
    assert {name for name in ops.__all__ if not name[0].isupper()} <= SUBJECTS.keys()


@pytest.mark.parametrize("op", SUBJECTS)
def test_both_compute_the_same(op):
    """Ours and torch's agree on the inputs that they are timed on, or the ratio would mean nothing."""
    for subject in SUBJECTS[op](tiny()):
        ours, torchs = subject.ours(), subject.torchs()
        assert subject.bytes > 0
        if op == "sample":
            assert ours.tokens.shape == torchs[0].shape
        else:
            torch.testing.assert_close(ours, torchs)


def test_prints_a_line_per_shape(monkeypatch, capsys):
    """Times, ratio and rates; only the ops that were asked for."""
    monkeypatch.setattr(bench, "setting", tiny)
    monkeypatch.setattr(
        sys, "argv", ["bench", "linear", "--device", "cpu", "--dtype", "bf16", "--threads", "1"]
    )
    assert bench.main() == 0
    head, _, columns, *lines = capsys.readouterr().out.splitlines()
    assert "torch.bfloat16" in head and columns.startswith("linear") and "GFLOP/s" in columns
    assert len(lines) == 4 and all("x" in line and line.startswith("  tiny, ") for line in lines)


def test_refuses_what_it_cannot_time(monkeypatch, capsys):
    """An unknown op; kernels that are interpreted."""
    monkeypatch.setattr(sys, "argv", ["bench", "warp"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "no such op: warp; there are silu_mul, " in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["bench"])
    monkeypatch.setattr(bench, "INTERPRETED", True)
    with pytest.raises(SystemExit):
        bench.main()
    assert "the interpreter's speed tells nothing" in capsys.readouterr().err
