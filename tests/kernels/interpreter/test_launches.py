"""How many kernels a decode step is: docs/kernels.md and benchmarks/roofline.py count on it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenspeed_rl import Engine
from tokenspeed_rl.core.decode_step import DecodeStep
from tokenspeed_rl_kernels.gpu.kernel import Build

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "roofline.py"


def test_ten_a_layer(tiny: Any, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """One more layer is as many more launches as the paper says, all of them ours up to 16 rows; the rest of
    a step that is ours is its metadata, its last norm, its head and the draw."""
    spec = importlib.util.spec_from_file_location("roofline", SCRIPT)
    assert spec is not None and spec.loader is not None
    roofline = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "roofline", roofline)
    spec.loader.exec_module(roofline)

    launched: list[str] = []
    run, step = Build.run, DecodeStep.__call__

    def counted(self: Build, kernel: Any, grid: tuple[int, ...], *args: Any) -> None:
        launched.append(kernel.__name__)
        run(self, kernel, grid, *args)

    def from_here(self: DecodeStep) -> None:
        launched.clear()
        step(self)
        steps.append(list(launched))

    monkeypatch.setattr(Build, "run", counted)
    monkeypatch.setattr(DecodeStep, "__call__", from_here)
    counts = []
    for layers in (1, 2):
        steps: list[list[str]] = []
        options = {"attention_backend": "triton", "max_running_requests": 2, "max_model_len": 64}
        engine = make_engine(tiny.config("qwen2", num_hidden_layers=layers), **options)
        engine.generate(input_ids=[[1, 2, 3], [4, 5]], sampling_params={"max_new_tokens": 4})
        counts.append(len(steps[-1]))
    assert counts[1] - counts[0] == len(roofline.LAYER_LAUNCHES)
    ours = ("step_metadata", "norm", "head", "sampling")
    assert counts[0] - len(roofline.LAYER_LAUNCHES) == sum(roofline.STEP_LAUNCHES[name] for name in ours)
