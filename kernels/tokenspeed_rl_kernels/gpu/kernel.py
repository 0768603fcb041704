"""A Triton kernel, the ways it is compiled, and its launch: for launchers and ahead-of-time checks alike."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

Constants = dict[str, Any]
"""Compile-time arguments of a kernel, by name."""
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}
"""How Triton's signatures name a dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """How a kernel is compiled for one family of shapes."""

    constants: Constants
    num_warps: int = 4
    num_stages: int = 3
    fp_fusion: bool = True
    """Whether a * b + c may be rounded once. Off where two kernels must agree bit for bit."""

    def run(self, kernel: Any, grid: tuple[int, ...], first: Tensor, *others: Any) -> None:
        """Run `kernel` on `grid`, unless that is empty, with these run-time arguments, on the first one's
        device: Triton would take the current one."""
        if 0 in grid:
            return
        with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
            kernel[grid](
                first,
                *others,
                **self.constants,
                num_warps=self.num_warps,
                num_stages=self.num_stages,
                enable_fp_fusion=self.fp_fusion,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One compilation to be checked ahead of time."""

    name: str
    """Unique: kernel and shape, as a golden file and a table name it."""
    kernel: Any
    """The jitted function."""
    types: dict[str, str]
    """Of the run-time arguments in order, as in Triton's signatures: "*bf16", "i32", "fp32"."""
    build: Build
    aligned: tuple[str, ...] = ()
    """Arguments that are multiples of 16, as Triton finds out of pointers and integers when it launches."""
    wants_mma: bool = False
    """Whether it must use matrix instructions."""
    wants_async: bool = False
    """Whether its loads must be pipelined by asynchronous copies."""
    may_wgmma: bool = False
    """Whether its matrix instructions may be sm_90's of 64 rows, whose sums are rounded otherwise than those
    of 16: not where two kernels must agree bit for bit."""


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of 2 that is n or more."""
    return int(triton.next_power_of_2(n))
