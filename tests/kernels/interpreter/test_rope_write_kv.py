"""Rotation, head norms and the write to the cache, in Triton."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.interpreter.memory import sparse, survive
from tests.kernels.test_rope_write_kv import inputs, transformers_rotate
from tokenspeed_rl_kernels.rope_write_kv import CASES, Case, reference, rope_write_kv

DIMS = tuple(
    Case(name=f"dim {dim}", tokens=2, heads=3, kv_heads=1, dim=dim, value_dim=value_dim, norm=norm)
    for dim, value_dim, norm in ((2, 1, False), (80, None, True), (96, None, False), (192, 128, False))
)
MANY_HEADS = (
    Case(name="more heads than a block", tokens=2, heads=48, kv_heads=40, dim=64),
    Case(name="widest", tokens=2, heads=10, kv_heads=9, dim=256, norm=True),
)
"""More than a program holds, and no multiple of it."""


@pytest.mark.parametrize("case", (*CASES, *DIMS, *MANY_HEADS), ids=lambda case: case.name)
def test_equals_transformers(case, dtype):
    """Bit for bit without a norm, which is summed in another order; poison stays in every other slot."""
    *tensors, options = inputs(case, dtype)
    q, k, v, positions, cos_sin, k_cache, v_cache, slots = tensors
    expected_q, expected_k = transformers_rotate(q, k, positions, cos_sin, **options)
    rotated = rope_write_kv(*tensors, **options)
    tolerance = 8 * torch.finfo(dtype).eps if case.norm else 0.0
    assert rotated.is_contiguous()
    torch.testing.assert_close(rotated, expected_q, rtol=tolerance, atol=tolerance)
    for cache, values in ((k_cache, expected_k), (v_cache, v)):
        expected = torch.full_like(cache, -7.0)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot // case.page_size, :, slot % case.page_size] = values[token]
        torch.testing.assert_close(cache, expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(cache == -7.0, expected == -7.0)


@pytest.mark.parametrize("case", (CASES[3], DIMS[1], MANY_HEADS[1]), ids=lambda case: case.name)
def test_norms_are_as_exact_as_torchs(case, dtype, check_exact):
    """With norms, the error against float64 is that of torch."""
    *tensors, options = inputs(case, dtype)
    *ours, _ = inputs(case, dtype)
    *wide, _ = inputs(case, dtype)
    wide = [x.double() if x.is_floating_point() else x for x in wide]
    wide[4] = wide[4].to(dtype).double()
    wide_options = {name: x.double() if torch.is_tensor(x) else x for name, x in options.items()}
    wide_options |= {"q_norm": None, "k_norm": None}
    for place, norm in ((0, options["q_norm"]), (1, options["k_norm"])):
        x = wide[place]
        wide[place] = norm.double() * x / (x.square().mean(-1, keepdim=True) + options["eps"]).sqrt()
    exact = reference(*wide, **wide_options)
    check_exact(rope_write_kv(*ours, **options), reference(*tensors, **options), exact)
    check_exact(ours[5], tensors[5], wide[5])


def test_tokens_dont_depend_on_each_other(dtype):
    """A token has the same bits alone as among others, norms included."""
    case = replace(CASES[3], tokens=9)
    *tensors, options = inputs(case, dtype)
    *alone, _ = inputs(case, dtype)
    together = rope_write_kv(*tensors, **options)
    for token in (0, 5, 8):
        one = [x[token : token + 1] if i in (0, 1, 2, 3, 7) else x for i, x in enumerate(alone)]
        assert torch.equal(rope_write_kv(*one, **options)[0], together[token])
        page, offset = divmod(int(tensors[7][token]), case.page_size)
        for cache, expected in zip(alone[5:7], tensors[5:7], strict=True):
            assert torch.equal(cache[page, :, offset], expected[page, :, offset])


@pytest.mark.parametrize("layout", ["heads first", "elements apart"])
def test_any_strides(layout, dtype):
    """Heads before tokens in memory, or elements that aren't side by side."""
    case = replace(CASES[2], tokens=5)
    *tensors, _ = inputs(case, dtype)
    *strided, _ = inputs(case, dtype)
    dims = (0, 1) if layout == "heads first" else (1, 2)
    for place in range(3):
        strided[place] = strided[place].transpose(*dims).contiguous().transpose(*dims)
    assert torch.equal(rope_write_kv(*strided), rope_write_kv(*tensors))
    assert torch.equal(strided[5], tensors[5]) and torch.equal(strided[6], tensors[6])


@pytest.mark.parametrize("slot", [-1, -16, -(2**40)])
def test_padding_rows_write_nothing(slot):
    """Padding rows writing slot 0: a negative slot, whatever it is, leaves the whole cache as it was."""
    *tensors, options = inputs(replace(CASES[5], unwritten=0))
    tensors[7].fill_(slot)
    rope_write_kv(*tensors, **options)
    assert (tensors[5] == -7.0).all() and (tensors[6] == -7.0).all()


def test_what_is_beyond_a_tensor():
    """Positions past the angles give NaN, slots past the cache write nothing: no other memory is touched."""
    *tensors, options = inputs(CASES[5])
    positions, cos_sin, k_cache, v_cache, slots = tensors[3:]
    slots[:] = torch.arange(len(slots))
    positions[0], positions[1], slots[2] = len(cos_sin), -1, k_cache.shape[0] * 16
    rotated = rope_write_kv(*tensors, **options)
    assert rotated[:2].isnan().all() and not rotated[2:].isnan().any()
    assert k_cache[0, :, :2].isnan().all() and not v_cache.isnan().any()
    assert (k_cache[0, :, 2] == -7.0).all() and (v_cache[0, :, 2] == -7.0).all()


def test_extreme_values():
    """1e4 in float16, with norms and without: squares are float32, products don't overflow."""
    for norm in (False, True):
        *tensors, options = inputs(replace(CASES[3], tokens=3, norm=norm), torch.float16)
        tensors[0].copy_(tensors[0].sign() * 1e4)
        tensors[1].zero_()
        expected = transformers_rotate(tensors[0], tensors[1], tensors[3], tensors[4], **options)
        rotated = rope_write_kv(*tensors, **options)
        torch.testing.assert_close(rotated, expected[0], rtol=2e-3, atol=2e-3)
        assert rotated.isfinite().all() and not tensors[5].isnan().any()


def test_a_cache_larger_than_int32_indexes():
    """Offsets past 2^31, of slots and of tokens' strides: the last slot is written, where it belongs."""
    case = Case(name="large", tokens=4, heads=1, kv_heads=2, dim=128)
    *tensors, options = inputs(case, torch.float16)
    pages = 2**31 // (2 * 16 * 128) + 3
    apart = sparse(4, 2**30 + 64, dtype=torch.float16)
    q = apart[:, :128].unflatten(1, (1, 128))
    q.copy_(tensors[0])
    caches = [sparse(pages, 2, 16, 128, dtype=torch.float16) for _ in range(2)]
    slots = torch.tensor([pages * 16 - 1, 3, -1, -1])

    def written():
        _, k, v, positions, cos_sin, *_ = tensors
        rotated = rope_write_kv(q, k, v, positions, cos_sin, *caches, slots, **options)
        expected = transformers_rotate(tensors[0], k, positions, cos_sin, None, None, 1e-6)
        assert torch.equal(rotated, expected[0])
        for cache, values in zip(caches, (expected[1], v), strict=True):
            assert torch.equal(cache[-1, :, 15], values[0]) and torch.equal(cache[0, :, 3], values[1])
            assert not cache[-1, :, :15].any() and not cache[0, :, :3].any() and not cache[0, :, 4:].any()

    survive(written)
