"""`rope_write_kv`: a program per token and block of heads, of the queries or of the keys and values."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_rl_kernels.gpu.kernel import TYPES, Build, Spec, cdiv, next_power_of_2

ELEMENTS = 2048
"""Of heads that a program holds at most, but for a single head."""


@triton.jit
def _rotated(x, at, inside, half, in_half, weight, cos, sin, eps, NORM: tl.constexpr, HALF: tl.constexpr):
    """Both halves of the heads whose elements start at ``at``, rotated, of x's dtype."""
    dtype = x.dtype.element_ty
    a = tl.load(x + at, inside, 0.0).to(tl.float32)
    b = tl.load(x + at + HALF, inside, 0.0).to(tl.float32)
    if NORM:
        mean = (tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF)
        scale = tl.rsqrt(mean + eps)[:, None]
        weight_a = tl.load(weight + half, in_half, 0.0).to(tl.float32)
        weight_b = tl.load(weight + HALF + half, in_half, 0.0).to(tl.float32)
        a = (weight_a * (a * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        b = (weight_b * (b * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    # Each product is rounded, then their sum, as transformers does.
    first = (a * cos).to(dtype).to(tl.float32) - (b * sin).to(dtype).to(tl.float32)
    second = (b * cos).to(dtype).to(tl.float32) + (a * sin).to(dtype).to(tl.float32)
    return first.to(dtype), second.to(dtype)


@triton.jit
def rope_write_kv_kernel(
    q, k, v, positions, cos_sin, k_cache, v_cache, slots, q_norm, k_norm, out,
    q_token, q_head, k_token, k_head, v_token, v_head, angles, slot_count, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, HALF: tl.constexpr, VALUE: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """out [T, Hq, D] of q, and the caches' slots of k and v; grid (T, blocks of Hq + blocks of Hkv).

    ``q_token`` to ``v_head`` are strides; ``angles`` the rows of cos_sin, ``slot_count`` the caches' P * S.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    half = tl.arange(0, BLOCK_HALF)
    in_half = half < HALF
    position = tl.load(positions + token).to(tl.int64)
    known = (position >= 0) & (position < angles)
    row = cos_sin + tl.where(known, position, 0) * 2 * HALF + half
    dtype = q.dtype.element_ty
    # A position without angles makes NaN: nothing here could raise.
    cos = tl.where(known, tl.load(row, in_half, 0.0), float("nan")).to(dtype).to(tl.float32)
    sin = tl.where(known, tl.load(row + HALF, in_half, 0.0), float("nan")).to(dtype).to(tl.float32)

    Q_BLOCKS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    if block < Q_BLOCKS:
        head = (block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        in_q = (head < HEADS) & in_half
        at = token * q_token + head.to(tl.int64) * q_head + half
        first, second = _rotated(q, at, in_q, half, in_half, q_norm, cos, sin, eps, Q_NORM, HALF)
        to = (token * HEADS + head) * 2 * HALF + half
        tl.store(out + to, first, in_q)
        tl.store(out + to + HALF, second, in_q)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        head = ((block - Q_BLOCKS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        written = head < tl.where((slot >= 0) & (slot < slot_count), KV_HEADS, 0)
        line = (slot // PAGE * KV_HEADS + head) * PAGE + slot % PAGE
        in_k = written & in_half
        at = token * k_token + head.to(tl.int64) * k_head + half
        first, second = _rotated(k, at, in_k, half, in_half, k_norm, cos, sin, eps, K_NORM, HALF)
        to = line * 2 * HALF + half
        tl.store(k_cache + to, first, in_k)
        tl.store(k_cache + to + HALF, second, in_k)
        value = tl.arange(0, BLOCK_VALUE)
        in_v = written & (value < VALUE)
        read = token * v_token + head.to(tl.int64) * v_head + value
        tl.store(v_cache + line * VALUE + value, tl.load(v + read, in_v, 0.0), in_v)


def build(
    *, heads: int, kv_heads: int, dim: int, value_dim: int, page_size: int, q_norm: bool, k_norm: bool
) -> Build:
    """How the kernel is compiled for a model's attention."""
    widest = max(next_power_of_2(dim // 2) * 2, next_power_of_2(value_dim))
    return Build(
        constants={
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "PAGE": page_size,
            "HALF": dim // 2,
            "VALUE": value_dim,
            "Q_NORM": q_norm,
            "K_NORM": k_norm,
            "BLOCK_HEADS": min(next_power_of_2(heads), max(ELEMENTS // widest, 1)),
            "BLOCK_HALF": next_power_of_2(dim // 2),
            "BLOCK_VALUE": next_power_of_2(value_dim),
        },
        num_stages=1,
        fp_fusion=False,  # products are rounded before they are added
    )


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """The op, for checked arguments."""
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    tokens, heads, dim = q.shape
    pages, kv_heads, page_size, value_dim = v_cache.shape
    kernel = build(
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        value_dim=value_dim,
        page_size=page_size,
        q_norm=q_norm is not None,
        k_norm=k_norm is not None,
    )
    block = kernel.constants["BLOCK_HEADS"]
    out = q.new_empty(q.shape)
    kernel.run(
        rope_write_kv_kernel,
        (tokens, cdiv(heads, block) + cdiv(kv_heads, block)),
        *(q, k, v, positions.contiguous(), cos_sin.contiguous(), k_cache, v_cache, slots.contiguous()),
        *(q if norm is None else norm.contiguous() for norm in (q_norm, k_norm)),
        out,
        *(stride for x in (q, k, v) for stride in x.stride()[:2]),
        len(cos_sin),
        pages * page_size,
        eps,
    )
    return out


def _spec(
    name: str, heads: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.bfloat16, norm: bool = False
) -> Spec:
    floats, cache = f"*{TYPES[dtype]}", ("k_cache", "v_cache")
    strides = ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head")
    types = dict.fromkeys(("q", "k", "v"), floats) | {"positions": "*i64", "cos_sin": "*fp32"}
    types |= dict.fromkeys(cache, floats) | {"slots": "*i64"}
    types |= dict.fromkeys(("q_norm", "k_norm", "out"), floats)
    pointers = tuple(types)
    types |= dict.fromkeys((*strides, "angles", "slot_count"), "i32") | {"eps": "fp32"}
    return Spec(
        name=f"rope_write_kv {name} {TYPES[dtype]}",
        kernel=rope_write_kv_kernel,
        types=types,
        aligned=(*pointers, *strides),
        build=build(
            heads=heads, kv_heads=kv_heads, dim=dim, value_dim=dim, page_size=16, q_norm=norm, k_norm=norm
        ),
    )


SPECS = (
    _spec("smollm2 9/3x64", 9, 3, 64),
    _spec("qwen2.5 14/2x64", 14, 2, 64),
    _spec("qwen2.5 14/2x64", 14, 2, 64, torch.float32),
    _spec("qwen2.5 12/2x128", 12, 2, 128),
    _spec("qwen3 32/8x128 normed", 32, 8, 128, norm=True),
    _spec("16/16x80", 16, 16, 80),
    _spec("16/4x96", 16, 4, 96),
    _spec("24/8x192", 24, 8, 192),
    _spec("8/4x256 normed", 8, 4, 256, norm=True),
)
