"""Rotary position embedding (Su et al. 2021), and the write of keys and values to the paged cache.

    (a, b) -> (a cos - b sin, b cos + a sin)   for the two halves a, b of a head, angles by position

With ``q_norm`` or ``k_norm`` each head is RMS-normalised first, as in Qwen3. Rounding is that of
transformers: cos and sin are cast to the dtype of q, products are of that dtype.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed_rl_kernels.checks import check_caches, misfit, shapes
from tokenspeed_rl_kernels.registry import op, runs_triton


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A shape to test."""

    name: str
    tokens: int
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    value_dim: int | None = None
    page_size: int = 16
    norm: bool = False
    unwritten: int = 0
    """Leading tokens with a negative slot."""


CASES = (
    Case(name="one token", tokens=1),
    Case(name="no tokens", tokens=0),
    Case(name="smollm2", tokens=64, heads=9, kv_heads=3),
    Case(name="normalised", tokens=33, norm=True),
    Case(name="values of another dim", tokens=5, dim=96, value_dim=80),
    Case(name="some unwritten", tokens=9, unwritten=4),
    Case(name="all unwritten", tokens=3, unwritten=3),
    Case(name="page 1", tokens=9, page_size=1),
)


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    return q.new_empty(q.shape)


@op(_fake, mutates=("k_cache", "v_cache"))
def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Rotate queries and keys, and write keys and values to their slots.

    Args:
        q: [T, Hq, D], any strides, D even, of the caches' dtype, as are k and v.
        k: [T, Hkv, D].
        v: [T, Hkv, Dv].
        positions: [T] int64, rows of ``cos_sin``.
        cos_sin: [L, D] float32: cos of the D/2 angles, then sin.
        k_cache: [P, Hkv, S, D], written.
        v_cache: [P, Hkv, S, Dv], written.
        slots: [T] int64, page * S + offset, distinct; < 0: nothing is written.
        q_norm: [D] weight of the queries' norm, of their dtype.
        k_norm: [D] weight of the keys' norm, the same.
        eps: of both norms.

    Returns:
        [T, Hq, D]: the rotated queries, contiguous.

    Raises:
        ValueError: shapes or dtypes misfit.
        IndexError: a position or slot is beyond its tensor. Triton can't raise: it makes NaN of such a
            position's queries and keys, and writes nothing to such a slot.
    """
    _check(q, k, v, cos_sin, k_cache, v_cache)
    if positions.shape != slots.shape or positions.shape != (len(q),):
        got = shapes(positions=positions, slots=slots, q=q)
        raise misfit("shapes misfit", got, "pass positions [T] and slots [T]")
    if any(index.dtype not in (torch.int32, torch.int64) for index in (positions, slots)):
        raise misfit("indices misfit", (positions.dtype, slots.dtype), "pass int64 positions and slots")
    if len(q) and not len(cos_sin):
        raise misfit("no angles", shapes(cos_sin=cos_sin), "pass cos_sin [L, D] with a row for each position")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None and (norm.shape != q.shape[2:] or norm.dtype != q.dtype):
            raise misfit(f"{name} misfits", (shapes(norm=norm, q=q), norm.dtype), "pass [D] of q's dtype")
    if runs_triton(q):
        from tokenspeed_rl_kernels.gpu import rope_write_kv as gpu

        return gpu.launch(q, k, v, positions, cos_sin, k_cache, v_cache, slots, q_norm, k_norm, eps)
    if q_norm is not None:
        q = _rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = _rms_norm(k, k_norm, eps)
    cos, sin = cos_sin.index_select(0, positions).to(q.dtype).unsqueeze(1).chunk(2, 2)
    cos, sin = torch.cat((cos, cos), 2), torch.cat((-sin, sin), 2)
    _write(k_cache, v_cache, slots, _rotate(k, cos, sin), v)
    return _rotate(q, cos, sin).contiguous()


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """`rope_write_kv`, token by token for the write."""

    def rotated(x: Tensor, norm: Tensor | None) -> Tensor:
        x = x if norm is None else _rms_norm(x, norm, eps)
        cos, sin = cos_sin[positions, None].to(x.dtype).chunk(2, -1)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    keys = rotated(k, k_norm)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, k_cache.shape[2])
            k_cache[page, :, offset] = keys[token]
            v_cache[page, :, offset] = v[token]
    return rotated(q, q_norm)


def _check(q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    check_caches(k_cache, v_cache)
    heads = k_cache.shape[1]
    fits = q.ndim == 3 and k.shape == (len(q), heads, q.shape[2]) and k.shape[2] == k_cache.shape[3]
    fits = fits and v.shape == (len(q), heads, v_cache.shape[3]) and cos_sin.shape[1:] == q.shape[2:]
    if not fits or q.shape[2] % 2:
        got = shapes(q=q, k=k, v=v, cos_sin=cos_sin, k_cache=k_cache, v_cache=v_cache)
        fix = "pass q [T, Hq, D], D even, k [T, Hkv, D], v [T, Hkv, Dv], cos_sin [L, D]"
        raise misfit("shapes misfit", got, fix)
    dtypes = [x.dtype for x in (q, k, v, k_cache, v_cache)]
    if len(set(dtypes)) > 1:
        raise misfit("dtypes of q, k, v and the caches differ", dtypes, "use one dtype")


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * (wide * wide).mean(-1, keepdim=True).add_(eps).rsqrt_()).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, H, D] with cos, and sin signed for the swapped halves, both [T, 1, D]."""
    return (x * cos).add_(x.roll(x.shape[2] // 2, 2).mul_(sin))


def _write(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    written = slots >= 0
    if not bool(written.all()):
        slots, k, v = slots[written], k[written], v[written]
    size = k_cache.shape[2]
    page, offset = slots // size, slots % size
    k_cache[page, :, offset] = k
    v_cache[page, :, offset] = v
