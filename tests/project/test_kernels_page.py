"""docs/kernels.md says what the kernels are and what benchmarks/roofline.py computes."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers

import tokenspeed_rl_kernels

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "kernels.md").read_text()


@pytest.fixture
def roofline(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("roofline", ROOT / "benchmarks" / "roofline.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "roofline", made)
    spec.loader.exec_module(made)
    yield made


def cells(table: str) -> list[list[str]]:
    """Of the rows of a Markdown table, the head first."""
    lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines()]
    return [lines[0], *lines[2:]]


def on_page(head: tuple[str, ...]) -> list[list[str]]:
    """The page's table whose first columns these are, and no others: measured ones stand behind them."""
    tables = [cells(text) for text in re.findall(r"(?:^\|.*\n)+", PAGE, re.M)]
    (found,) = (table for table in tables if tuple(table[0][: len(head)]) == head)
    return [row[: len(head)] for row in found]


def test_figures_are_those_of_the_script(roofline: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever runs the script gets the page's tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["roofline.py"])
        assert roofline.main() == 0
    first, second = (cells(text) for text in capsys.readouterr().out.strip().split("\n\n"))
    assert on_page(roofline.HEAD) == first
    assert on_page(roofline.SHARED_HEAD) == second


def test_launches_are_listed(roofline: ModuleType) -> None:
    """What the page calls the ten kernels of a layer, and those of a step, is what the script counts."""
    text = " ".join(PAGE.split())
    layer = ", ".join(f"`{name}`" for name in roofline.LAYER_LAUNCHES)
    assert f"A layer of a decode step is ten kernels: {layer}." in text
    assert len(roofline.LAYER_LAUNCHES) == 10 and roofline.AIM == 6
    step = ", ".join(f"{name} {count}" for name, count in roofline.STEP_LAUNCHES.items())
    assert f"A step adds {sum(roofline.STEP_LAUNCHES.values())} more: {step}." in text


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B", "SmolLM2-135M"])
def test_bytes_are_those_of_the_model(roofline: ModuleType, name: str) -> None:
    """The paper counts the weights that transformers' model of the shape has, and its cache."""
    shape = roofline.SHAPES[name]
    family = transformers.Qwen2Config if shape.qkv_bias else transformers.LlamaConfig
    config = family(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())
    attention = model.model.layers[0].self_attn
    assert shape.kv_token == 2 * shape.layers * attention.k_proj.out_features
    assert shape.head_dim == attention.head_dim


def test_every_op_is_listed() -> None:
    """The page's ops are those that there are."""
    listed = {name for name in re.findall(r"^\| `(\w+)` \|", PAGE, re.M)}
    ops = {name for name in tokenspeed_rl_kernels.__all__ if name.islower()}
    assert ops == listed
