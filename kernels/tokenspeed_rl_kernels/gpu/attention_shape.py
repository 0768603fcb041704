"""For which shapes, and how, decode and prefill are compiled: alike, so that they agree bit for bit."""

from dataclasses import dataclass
from math import log
from typing import Any

import torch
from torch import Tensor

from tokenspeed_rl_kernels.attention_options import AttentionOptions
from tokenspeed_rl_kernels.decode_work import SPLIT
from tokenspeed_rl_kernels.gpu.kernel import TYPES, Build, Constants, Spec, cdiv, next_power_of_2

TILE_BYTES = 8 << 10
"""Of one tile of keys, or of values."""
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
    def padded(self) -> tuple[int, int]:
        """Columns of a tile of keys, and of one of values."""
        return max(16, next_power_of_2(self.dim)), max(16, next_power_of_2(self.value_dim))

    @property
    def queries(self) -> int:
        """Rows of a tile of queries: (token, head) pairs that share a key-value head.

        Each of 8 warps holds them all, so more would take more than 128 registers. From 64 on, sm_90 takes
        another matrix instruction.
        """
        return 32 if max(self.padded) * self.dtype.itemsize <= 128 else 16

    @property
    def tile_heads(self) -> int:
        """Query heads of a key-value head that a tile has room for: a power of 2, which saves registers."""
        return min(self.queries, next_power_of_2(self.heads // self.kv_heads))

    @property
    def head_blocks(self) -> int:
        """Tiles that it takes to hold all query heads of a key-value head."""
        return cdiv(self.heads // self.kv_heads, self.tile_heads)

    @property
    def tile_tokens(self) -> int:
        """Query tokens, or rows, that a tile has room for."""
        return self.queries // self.tile_heads

    def build(self, constants: Constants) -> Build:
        """How a kernel that reads tiles is compiled; ``constants`` are its own beside those of all."""
        dims = {"DIM": self.dim, "VALUE_DIM": self.value_dim}
        padded = dict(zip(("PADDED", "VALUE_PADDED"), self.padded, strict=True))
        tile = {
            "QUERIES": self.queries,
            "KEYS": max(16, TILE_BYTES // (max(self.padded) * self.dtype.itemsize)),
            "HEADS": self.tile_heads,
            "GROUP": self.heads // self.kv_heads,
        }
        cache = {"KV_HEADS": self.kv_heads, "PAGE": self.page_size, "SPLIT": SPLIT, "CAPPED": self.capped}
        # Page ids are loaded two tiles ahead of keys, which are loaded two tiles ahead of their use.
        return Build(
            constants={**dims, **padded, **tile, **cache, **constants},
            num_warps=8,
            num_stages=5,
            fp_fusion=False,
        )


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
    tiled = "q" in types
    return Spec(
        name=name,
        kernel=kernel,
        types=types,
        build=build,
        aligned=aligned,
        wants_mma=tiled and shape.dtype != torch.float32,
        wants_async=tiled,
    )
