"""For which shapes, and how, decode and prefill are compiled: alike, so that they agree bit for bit."""

from dataclasses import dataclass
from math import log
from typing import Any

import torch
from torch import Tensor

from tokenspeed_rl_kernels.attention_options import AttentionOptions
from tokenspeed_rl_kernels.decode_work import SPLIT
from tokenspeed_rl_kernels.gpu.kernel import TYPES, Build, Constants, Spec, cdiv, next_power_of_2

QUERIES = 32
"""Rows of a tile: (token, head) pairs that share a key-value head. At 64, sm_90 takes another instruction."""
TILE_BYTES = 16 << 10
"""Of one tile of keys."""
LOG2_E = 1 / log(2)
EVERYTHING = 2**31 - 1
"""The window of those that have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What the kernels are compiled for."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    page_size: int
    dtype: torch.dtype
    capped: bool = False
    sinks: bool = False

    @classmethod
    def of(cls, q: Tensor, k_cache: Tensor, v_cache: Tensor, options: AttentionOptions) -> "AttentionShape":
        """The shape of these arguments."""
        return cls(
            heads=q.shape[1],
            kv_heads=k_cache.shape[1],
            dim=q.shape[2],
            value_dim=v_cache.shape[3],
            page_size=k_cache.shape[2],
            dtype=q.dtype,
            capped=options.softcap is not None,
            sinks=options.sinks is not None,
        )

    @property
    def head_blocks(self) -> int:
        """Tiles that it takes to hold the query heads of a key-value head."""
        return cdiv(self.heads // self.kv_heads, QUERIES)

    @property
    def tile_heads(self) -> int:
        """Query heads of a key-value head in one tile."""
        return cdiv(self.heads // self.kv_heads, self.head_blocks)

    @property
    def tile_tokens(self) -> int:
        """Query tokens, or rows, in one tile."""
        return QUERIES // self.tile_heads

    def constants(self) -> Constants:
        """Of a kernel that reads tiles."""
        padded, value_padded = (max(16, next_power_of_2(dim)) for dim in (self.dim, self.value_dim))
        keys = TILE_BYTES // (max(padded, value_padded) * self.dtype.itemsize)
        return {
            "CAPPED": self.capped,
            "GROUP": self.heads // self.kv_heads,
            "HEADS": self.tile_heads,
            "KV_HEADS": self.kv_heads,
            "PAGE": self.page_size,
            "DIM": self.dim,
            "VALUE_DIM": self.value_dim,
            "PADDED": padded,
            "VALUE_PADDED": value_padded,
            "QUERIES": QUERIES,
            "KEYS": min(max(keys, 16), 128),
            "SPLIT": SPLIT,
        }


def factors(options: AttentionOptions, dim: int) -> tuple[float, float]:
    """What `logits_of` multiplies by: ``factor`` and ``cap``."""
    if options.softcap is None:
        return options.scale_for(dim) * LOG2_E, 0.0
    return 2 * options.scale_for(dim) / options.softcap * LOG2_E, options.softcap * LOG2_E


def window_of(options: AttentionOptions) -> int:
    """The window that kernels are given."""
    return EVERYTHING if options.window is None else min(options.window, EVERYTHING)


def _bf16(heads: int, kv_heads: int, dim: int, **changes: Any) -> AttentionShape:
    common = {"value_dim": dim, "page_size": 16, "dtype": torch.bfloat16}
    return AttentionShape(heads=heads, kv_heads=kv_heads, dim=dim, **{**common, **changes})


SHAPES = {
    "Qwen2.5 0.5B": _bf16(14, 2, 64),
    "Qwen2.5 1.5B": _bf16(12, 2, 128),
    "SmolLM2": _bf16(9, 3, 64),
    "float32": _bf16(14, 2, 64, dtype=torch.float32),
    "float32, dim 128": _bf16(12, 2, 128, dtype=torch.float32),
    "softcap, dim 256": _bf16(8, 4, 256, capped=True),
    "sinks": _bf16(64, 8, 64, sinks=True),
    "dim 80": _bf16(32, 32, 80),
    "dim 96": _bf16(32, 32, 96),
    "dims 192 and 128": _bf16(16, 16, 192, value_dim=128),
}
"""Those checked ahead of time."""


def spec(name: str, kernel: Any, build: Build, shape: AttentionShape, arguments: str) -> Spec:
    """A compilation of a kernel with these run-time arguments, whose names tell their types."""
    kinds = {
        **dict.fromkeys(("q", "k_cache", "v_cache", "out"), f"*{TYPES[shape.dtype]}"),
        **dict.fromkeys(("tops", "masses", "accs", "sinks"), "*fp32"),
        **dict.fromkeys(("table_stride", "max_splits", "rows", "window"), "i32"),
        **dict.fromkeys(("factor", "cap"), "fp32"),
    }
    types = {argument: kinds.get(argument, "*i32") for argument in arguments.split()}
    aligned = tuple(argument for argument, kind in types.items() if kind.startswith("*"))
    return Spec(name=name, kernel=kernel, types=types, build=build, aligned=aligned)
