"""Rotation, head norms and the write to the cache."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tokenspeed_rl_kernels.rope_write_kv import CASES, reference, rope_write_kv


def inputs(case, dtype=torch.float32):
    """q, k, v as views of one projection, as the decoder passes them."""
    generator = torch.Generator().manual_seed(case.tokens)
    value_dim = case.value_dim or case.dim
    widths = [case.heads * case.dim, case.kv_heads * case.dim, case.kv_heads * value_dim]
    qkv = torch.randn(case.tokens, sum(widths), generator=generator).to(dtype)
    parts = zip(qkv.split(widths, 1), (case.dim, case.dim, value_dim), strict=True)
    q, k, v = (part.unflatten(1, (-1, dim)) for part, dim in parts)
    pages = case.tokens // case.page_size + 3
    positions = torch.randint(0, 50, (case.tokens,), generator=generator)
    slots = torch.randperm(pages * case.page_size, generator=generator)[: case.tokens]
    slots[: case.unwritten] = -1
    angles = torch.arange(50).unsqueeze(1) / 10000 ** (torch.arange(0, case.dim, 2) / case.dim)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    caches = [
        torch.full((pages, case.kv_heads, case.page_size, dim), -7.0, dtype=dtype)
        for dim in (case.dim, value_dim)
    ]
    norms = [torch.randn(case.dim, generator=generator).to(dtype) if case.norm else None for _ in range(2)]
    return q, k, v, positions, cos_sin, *caches, slots, {"q_norm": norms[0], "k_norm": norms[1], "eps": 1e-5}


def transformers_rotate(q, k, positions, cos_sin, q_norm, k_norm, eps):
    def normed(x, weight):
        if weight is None:
            return x
        norm = Qwen3RMSNorm(len(weight), eps=eps).to(weight.dtype)
        norm.weight.data.copy_(weight)
        return norm(x)

    cos, sin = (table[positions].repeat(1, 2)[None].to(q.dtype) for table in cos_sin.chunk(2, 1))
    heads_first = [normed(x, w).transpose(0, 1)[None] for x, w in ((q, q_norm), (k, k_norm))]
    return [x[0].transpose(0, 1) for x in apply_rotary_pos_emb(*heads_first, cos, sin)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_transformers_bit_for_bit(case, dtype):
    """Queries and cached keys are the trainer's, bit for bit; values and every other slot are untouched."""
    *arguments, options = inputs(case, dtype)
    q, k, v, positions, cos_sin, k_cache, v_cache, slots = arguments
    with torch.no_grad():
        expected_q, expected_k = transformers_rotate(q, k, positions, cos_sin, **options)
        rotated = rope_write_kv(*arguments, **options)
    assert torch.equal(rotated, expected_q)
    for cache, values in ((k_cache, expected_k), (v_cache, v)):
        expected = torch.full_like(cache, -7.0)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot // case.page_size, :, slot % case.page_size] = values[token]
        assert torch.equal(cache, expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reference_agrees(case):
    """The reference writes and returns what the op does."""
    *ours, options = inputs(case)
    *slow, _ = inputs(case)
    assert torch.equal(rope_write_kv(*ours, **options), reference(*slow, **options))
    assert torch.equal(ours[5], slow[5]) and torch.equal(ours[6], slow[6])


def test_the_result_is_contiguous():
    """Whatever the strides of the queries."""
    q, *others, _ = inputs(CASES[2])
    q = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert rope_write_kv(q, *others).is_contiguous()


def test_positions_past_the_table_are_refused():
    """A position without an angle raises; nothing reads past the table."""
    q, k, v, positions, cos_sin, k_cache, v_cache, slots, _ = inputs(CASES[2])
    positions[3] = len(cos_sin)
    with pytest.raises(IndexError):
        rope_write_kv(q, k, v, positions, cos_sin, k_cache, v_cache, slots)


def test_misfits_are_refused():
    """Each misfit argument raises ValueError naming the shapes it got."""
    q, k, v, positions, cos_sin, k_cache, v_cache, slots, _ = inputs(CASES[2])
    fine = [q, k, v, positions, cos_sin, k_cache, v_cache, slots]
    for place, bad in ((0, q[1:]), (1, k[:, 1:]), (2, v[..., 1:]), (3, positions[1:]), (4, cos_sin[:, 1:])):
        with pytest.raises(ValueError, match="shapes misfit: got"):
            rope_write_kv(*fine[:place], bad, *fine[place + 1 :])
