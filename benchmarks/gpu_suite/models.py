"""Models of known shapes with random weights, and engines of them."""

from typing import Any

import torch
from roofline import SHAPES, Shape
from transformers import Qwen2Config

from gpu_suite.machine import Machine
from tokenspeed_rl import Engine

TOY = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=256)
MEASURED = ("Qwen2.5-0.5B", "Qwen2.5-1.5B")


def shapes(machine: Machine) -> dict[str, Shape]:
    """Those that are measured, by name."""
    return {"toy": TOY} if machine.dry else {name: SHAPES[name] for name in MEASURED}


def config(shape: Shape, **changes: Any) -> Qwen2Config:
    """transformers' config of it; no token ends a text."""
    numbers = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return Qwen2Config(**{**numbers, **changes})


def engine(machine: Machine, model: Qwen2Config, *, graphs: bool = True, **settings: Any) -> Engine:
    """Seeded random weights in bfloat16; on a GPU by Triton."""
    device = str(machine.device)
    backend = "triton" if machine.cuda else "torch"
    asked = {"attention_backend": backend, "enable_cuda_graph": graphs, "dtype": "bfloat16", **settings}
    return Engine(model, device=device, **asked)


def prompts(count: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[list[int]] = torch.randint(vocab, (count, length), generator=generator).tolist()
    return ids
