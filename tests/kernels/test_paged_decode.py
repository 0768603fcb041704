"""Decode attention over pages: right, blind to what it must not see, the same whatever is beside a row."""

import pytest
import torch

from tokenspeed_rl_kernels.attention_options import AttentionOptions
from tokenspeed_rl_kernels.cpu import page_reads
from tokenspeed_rl_kernels.cpu.paged_decode import decode_with, plan_decode
from tokenspeed_rl_kernels.paged_decode import CASES, Case, paged_decode, reference

IDS = [case.name for case in CASES]


@pytest.fixture(autouse=True)
def every_prefix_is_shared(monkeypatch):
    """Small prefixes would be left to each row for speed: the tests want them shared."""
    monkeypatch.setattr("tokenspeed_rl_kernels.cpu.paged_decode.LEAST_SPARED_BYTES", 0)


def run(c, **changes):
    return paged_decode(
        c.q, c.k_cache, c.v_cache, c.table, c.lens, **{**c.options, "shared": c.shared, **changes}
    )


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_equals_dense_attention(case, paged, dense_attention, check_exact):
    """Every group size, head dim, page size and option is exact, with NaN in all slots that are not used."""
    c = paged(case, len(case.lens))
    rows = list(zip(c.q, c.keys, c.values, strict=True))
    exact = torch.cat([dense_attention(q[None], k, v, **c.options) for q, k, v in rows])
    plain = torch.cat([dense_attention(q[None], k, v, **c.options, dtype=torch.float32) for q, k, v in rows])
    check_exact(run(c), plain, exact)
    check_exact(reference(c.q, c.k_cache, c.v_cache, c.table, c.lens, **c.options), plain, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_accumulates_in_float32(dtype, paged, dense_attention):
    """Half-precision inputs lose no more than the rounding of the result."""
    c = paged(Case(name="half", lens=(300, 17), dim=80), 2, dtype)
    exact = torch.cat([dense_attention(q[None], k, v) for q, k, v in zip(c.q, c.keys, c.values, strict=True)])
    assert torch.allclose(run(c).double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("scratch", [1, 40_000, 1 << 30])
def test_chunks_don_t_change_a_row(scratch, paged, monkeypatch):
    """Rows may be read one by one or all together: chunking is a matter of speed."""
    c = paged(next(case for case in CASES if case.name == "ragged"), 5)
    expected = run(c)
    monkeypatch.setattr(page_reads, "SCRATCH_BYTES", scratch)
    torch.testing.assert_close(run(c), expected, rtol=0, atol=2e-6)


def test_a_row_alone_equals_the_row_in_a_batch(paged):
    """F12: batch mates, their order and their lengths move a row by float32 rounding at most."""
    c = paged(Case(name="many", lens=tuple(range(1, 200, 7)), heads=9, kv_heads=3), 29)
    together = run(c)
    order = torch.randperm(29, generator=torch.Generator().manual_seed(0))
    shuffled = paged_decode(c.q[order], c.k_cache, c.v_cache, c.table[order], c.lens[order])
    alone = torch.cat(
        [
            paged_decode(c.q[b, None], c.k_cache, c.v_cache, c.table[b, None], c.lens[b, None])
            for b in range(29)
        ]
    )
    torch.testing.assert_close(together[order], shuffled, rtol=0, atol=1e-6)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", [case for case in CASES if case.prefix], ids=lambda case: case.name)
def test_sharing_a_prefix_changes_nothing(case, paged):
    """Reading a prefix once for its rows gives what each row would have read itself."""
    c = paged(case, len(case.lens))
    torch.testing.assert_close(run(c), run(c, shared=None), rtol=0, atol=2e-6)


def test_a_shared_prefix_is_read_from_its_own_pages(paged):
    """With sharing, the rows' own entries for prefix pages are never touched."""
    c = paged(next(case for case in CASES if case.name == "shared prefix"), 6)
    expected = run(c)
    for row, group in enumerate(c.shared[2].tolist()):
        if group >= 0:
            c.table[row, : int(c.shared[1][group]) // 16] = 2**31 - 1
    assert torch.equal(run(c), expected)


def test_a_small_prefix_is_left_to_its_rows(paged, monkeypatch):
    """Sharing that spares little reading is not done: rows read their own pages, with the same result."""
    c = paged(next(case for case in CASES if case.name == "shared prefix"), 6)
    monkeypatch.undo()
    expected = run(c, shared=None)
    c.shared[0].fill_(2**31 - 1)
    assert torch.equal(run(c), expected)


def test_no_groups(paged):
    """No groups at all are as good as no sharing."""
    c = paged(CASES[1], 5)
    none = torch.zeros(0, 2), torch.zeros(0), torch.full((5,), -1)
    assert torch.equal(run(c, shared=none), run(c, shared=None))


def test_a_broken_request_stays_alone(paged):
    """F7: NaN in one row's query and cache reaches no other row, neither by batch nor by a shared prefix."""
    c = paged(next(case for case in CASES if case.name == "shared prefix"), 6)
    expected = run(c)
    c.q[0] = torch.nan
    c.k_cache[c.table[0, int(c.shared[1][0]) // 16]] = torch.nan
    broken = run(c)
    assert broken[0].isnan().all()
    assert torch.equal(broken[1:], expected[1:])


def test_a_broken_prefix_stays_in_its_group(paged):
    """F7: NaN in a prefix reaches the rows that share it and no row without a group."""
    c = paged(next(case for case in CASES if case.name == "shared prefix"), 6)
    expected = run(c)
    c.v_cache[c.shared[0][0, 0]] = torch.nan
    broken, others = run(c), c.shared[2] != 0
    assert broken[~others].isnan().any(2).all()
    assert torch.equal(broken[others], expected[others])


def test_offsets_beyond_2_to_the_31(dense_attention):
    """Page ids are widened before they are multiplied: a cache of more than 2^31 elements works."""
    torch.manual_seed(0)
    heads, size, dim = 8, 256, 256
    pages = 2**31 // (heads * size * dim) + 2
    k_cache, v_cache = (torch.empty(pages, heads, size, dim, dtype=torch.float16) for _ in range(2))
    last = pages - 1  # only this page is ever touched
    k_cache[last], v_cache[last] = torch.randn(2, heads, size, dim).half()
    q = torch.randn(1, heads, dim).half()
    out = paged_decode(q, k_cache, v_cache, torch.tensor([[last]]), torch.tensor([200]))
    k, v = (cache[last, :, :200].transpose(0, 1) for cache in (k_cache, v_cache))
    assert torch.allclose(out.double(), dense_attention(q, k, v), rtol=1e-3, atol=1e-3)


def test_softcap_far_out():
    """Scores of 1e4 and more saturate the softcap instead of overflowing."""
    q, cache = torch.full((1, 1, 64), 1e4), torch.full((1, 1, 4, 64), 1e4)
    out = paged_decode(q, cache, cache, torch.tensor([[0]]), torch.tensor([4]), softcap=30.0)
    assert torch.equal(out, torch.full((1, 1, 64), 1e4))


def test_one_plan_serves_layers_and_queries(paged):
    """A plan is made once per step: with it, every layer's result is what a call of its own would give."""
    c = paged(next(case for case in CASES if case.name == "shared prefix"), 6)
    plan = plan_decode(c.k_cache, c.v_cache, c.table, c.lens, shared=c.shared)
    for factor in (1.0, 2.0):
        k_cache = c.k_cache * factor
        planned = decode_with(plan, c.q, k_cache, c.v_cache, AttentionOptions())
        assert torch.equal(planned, paged_decode(c.q, k_cache, c.v_cache, c.table, c.lens, shared=c.shared))


def test_no_rows():
    """A batch of nothing gives nothing."""
    cache = torch.zeros(1, 2, 4, 8)
    empty = torch.zeros(0, 3, dtype=torch.int32)
    out = paged_decode(torch.zeros(0, 4, 8), cache, cache, empty, empty[:, 0])
    assert out.shape == (0, 4, 8)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"q": torch.zeros(2, 3, 8)}, "multiple of its Hkv"),
        ({"q": torch.zeros(2, 4, 6)}, "cache's D"),
        ({"q": torch.zeros(2, 4, 8, dtype=torch.float16)}, "dtypes differ"),
        ({"k_cache": torch.zeros(5, 2, 4, 8).transpose(1, 2)}, "misshapen"),
        ({"v_cache": torch.zeros(5, 2, 8, 4).transpose(2, 3)}, "contiguous"),
        ({"seq_lens": torch.tensor([1])}, "page table misfits"),
        ({"q": torch.zeros(3, 4, 8)}, "rows misfit"),
        ({"q": torch.zeros(1, 4, 8)}, "rows misfit"),
        ({"seq_lens": torch.tensor([1, 13])}, "row 1 out of range: got 13"),
        ({"seq_lens": torch.tensor([-1, 3])}, "row 0 out of range: got -1"),
        ({"seq_lens": torch.tensor([1.0, 3.0])}, "wrong dtype"),
        ({"window": 0}, "window must be positive"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"sinks": torch.zeros(2)}, "sinks misshapen"),
        ({"shared": (torch.zeros(1, 1), torch.tensor([4]), torch.tensor([0]))}, "shared misshapen"),
        (
            {"shared": (torch.zeros(1, 1), torch.tensor([3]), torch.tensor([0, -1]))},
            "prefix length of group 0",
        ),
        (
            {"shared": (torch.zeros(1, 1), torch.tensor([8]), torch.tensor([0, -1]))},
            "prefix length of group 0",
        ),
        ({"shared": (torch.zeros(1, 1), torch.tensor([4]), torch.tensor([1, -1]))}, "group of row 0"),
        ({"shared": (torch.zeros(1, 1), torch.tensor([4]), torch.tensor([-1, 0]))}, "group of row 1"),
    ],
)
def test_misfits_are_refused(change, word):
    """A misfit raises ValueError that says what is wrong and what it got, before anything is read."""
    arguments = {
        "q": torch.zeros(2, 4, 8),
        "k_cache": torch.zeros(5, 2, 4, 8),
        "v_cache": torch.zeros(5, 2, 4, 8),
        "page_table": torch.zeros(2, 3, dtype=torch.int32),
        "seq_lens": torch.tensor([5, 3], dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=word):
        paged_decode(**{**arguments, **change})
