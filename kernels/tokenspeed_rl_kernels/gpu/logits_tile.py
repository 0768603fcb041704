"""A tile of logits, as both passes of `linear_logprob` compute them: bit for bit the same."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_rl_kernels.checks import misfit
from tokenspeed_rl_kernels.gpu.kernel import Build
from tokenspeed_rl_kernels.gpu.product_tile import product_tile


@triton.jit
def logits_tile(
    hidden,
    hidden_stride,
    token,
    tokens,
    weight,
    weight_stride,
    bias,
    column,
    vocab,
    width,
    scale,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """z [M, N]; -inf past the vocabulary."""
    z = product_tile(
        hidden,
        hidden_stride,
        token,
        tokens,
        weight,
        weight_stride,
        column,
        vocab,
        width,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    if BIAS:
        z += tl.load(bias + column, column < vocab, 0.0).to(tl.float32)[None, :]
    return tl.where((column < vocab)[None, :], z * scale, float("-inf"))


@triton.jit
def load_target(targets, token, tokens, vocab):
    """int32 [M]; -1 where it isn't in the vocabulary."""
    target = tl.load(targets + token, token < tokens, -1)
    return tl.where((target >= 0) & (target < vocab), target, -1).to(tl.int32)


class Head(NamedTuple):
    """What logits are computed from, and the targets, laid out for kernels."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> "Head":
        """Of the op's arguments: rows without gaps in them."""
        if hidden.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise misfit("dtype has no kernel", hidden.dtype, "pass bfloat16, float16 or float32")
        hidden, weight = (t if t.stride(1) == 1 else t.contiguous() for t in (hidden, weight))
        return cls(hidden, weight, hidden if bias is None else bias.contiguous(), targets.contiguous())

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Tokens, vocabulary, width, and the strides of both."""
        hidden, weight = self.hidden, self.weight
        return len(hidden), *weight.shape, hidden.stride(0), weight.stride(0)


def tile_build(dtype: torch.dtype, bias: bool, **more: int) -> Build:
    """How the kernels that compute logits are compiled."""
    if dtype == torch.float32:
        blocks, stages = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 16}, 3
    else:
        blocks, stages = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 32}, 4
    return Build(constants={"BIAS": bias, **blocks, **more}, num_warps=8, num_stages=stages)
