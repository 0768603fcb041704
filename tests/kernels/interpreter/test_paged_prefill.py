"""Prefill attention in Triton: right, and the same bits as decode, for any cut into chunks."""

import pytest
import torch

from tokenspeed_rl_kernels.paged_decode import paged_decode
from tokenspeed_rl_kernels.paged_prefill import CASES, Case, paged_prefill, reference

MORE_CASES = (
    Case(name="group 16", queries=(3,), lens=(9,), heads=16, kv_heads=1),
    Case(name="group 40", queries=(3,), lens=(9,), heads=40, kv_heads=1),
    Case(name="dim 128", queries=(9,), lens=(20,), heads=2, kv_heads=2, dim=128),
    Case(name="dim 256", queries=(9,), lens=(20,), heads=2, kv_heads=1, dim=256),
    Case(name="page 32", queries=(9, 3), lens=(9, 70), page_size=32),
    Case(name="splits", queries=(20, 3, 2), lens=(270, 600, 256), dim=16),
    Case(name="splits, window, sinks", queries=(20, 3), lens=(270, 600), dim=16, window=257, sinks=True),
)
ALSO_FLOAT32 = {"whole prompts", "chunks", "values of another dim", "sinks, window, softcap", "splits"}
SMALL = [case for case in (*CASES, *MORE_CASES) if sum(case.queries) <= 100]
RUNS = [pytest.param(case, torch.float16, id=case.name) for case in SMALL] + [
    pytest.param(case, torch.float32, id=f"{case.name}, float32")
    for case in SMALL
    if case.name in ALSO_FLOAT32
]
WHOLE = Case(name="whole", queries=(9,), lens=(518,), heads=6, kv_heads=2, dim=16)


def starts_of(queries):
    return torch.tensor([0, *queries], dtype=torch.int32).cumsum(0).int()


@pytest.mark.parametrize(("case", "dtype"), RUNS)
def test_equals_dense_attention(case, dtype, paged, check_exact):
    """Every group size, head dim, page size, past and option is exact, though unused slots are NaN."""
    c = paged(case, sum(case.queries), dtype)
    inputs = c.table, starts_of(case.queries), c.lens
    exact, plain = (
        reference(*(x.to(wide) for x in (c.q, c.k_cache, c.v_cache)), *inputs, **c.options)
        for wide in (torch.float64, dtype)
    )
    check_exact(paged_prefill(c.q, c.k_cache, c.v_cache, *inputs, **c.options), plain, exact)


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 9}, {"window": 260, "softcap": 5.0}, {"sinks": torch.tensor([0.1, 2, -3, 0, 1, 9])}],
    ids=["plain", "window", "window over splits, softcap", "sinks"],
)
def test_chunks_and_decode_agree_with_the_whole(options, paged):
    """F9: tokens taken together, in chunks, or one by one by `paged_decode` give the same bits."""
    c = paged(WHOLE, 9)

    def part(start, stop):
        lens = torch.tensor([509 + stop], dtype=torch.int32)
        q = c.q[start:stop]
        return paged_prefill(q, c.k_cache, c.v_cache, c.table, starts_of([len(q)]), lens, **options)

    whole = part(0, 9)
    assert torch.equal(torch.cat([part(0, 1), part(1, 7), part(7, 9)]), whole)
    lens = torch.arange(510, 519, dtype=torch.int32)
    decoded = paged_decode(c.q, c.k_cache, c.v_cache, c.table.expand(9, -1), lens, **options)
    assert torch.equal(decoded, whole)


def test_finds_its_row_among_many(paged):
    """More rows than are searched at a time, many without queries; queries are what decode makes of them."""
    queries = [0, 1, 0, 0, 3] * 26
    case = Case(
        name="many rows", queries=tuple(queries), lens=(3,) * len(queries), heads=1, kv_heads=1, dim=16
    )
    c, starts = paged(case, sum(queries)), starts_of(queries)
    together = paged_prefill(c.q, c.k_cache, c.v_cache, c.table, starts, c.lens)
    exact = reference(c.q.double(), c.k_cache.double(), c.v_cache.double(), c.table, starts, c.lens)
    torch.testing.assert_close(together.double(), exact, rtol=0, atol=1e-6)


def test_a_row_is_the_same_in_any_batch(paged):
    """F12: batch mates and where pages lie change no bit of a row; nor does NaN in another."""
    case = Case(name="mates", queries=(5, 7, 1), lens=(21, 263, 50), dim=16)
    c, starts = paged(case, 13), starts_of(case.queries)
    together = paged_prefill(c.q, c.k_cache, c.v_cache, c.table, starts, c.lens)
    pages = torch.arange(len(c.k_cache)).flip(0)
    moved = torch.where(c.table < len(pages), len(pages) - 1 - c.table, c.table)
    c.q[:5] = torch.nan
    broken = paged_prefill(c.q, c.k_cache[pages], c.v_cache[pages], moved, starts, c.lens)
    assert broken[:5].isnan().all()
    assert torch.equal(broken[5:], together[5:])
    for row in (1, 2):
        span, one = slice(int(starts[row]), int(starts[row + 1])), slice(row, row + 1)
        inputs = c.table[one], starts_of([case.queries[row]]), c.lens[one]
        assert torch.equal(paged_prefill(c.q[span], c.k_cache, c.v_cache, *inputs), together[span])


def test_offsets_beyond_2_to_the_31(dense_attention):
    """Page ids are widened before they are multiplied: a cache of more than 2^31 elements works."""
    torch.manual_seed(0)
    heads, size, dim = 8, 256, 256
    pages = 2**31 // (heads * size * dim) + 2
    k_cache, v_cache = (torch.empty(pages, heads, size, dim, dtype=torch.float16) for _ in range(2))
    last = pages - 1  # only this page is ever touched
    k_cache[last], v_cache[last] = torch.randn(2, heads, size, dim).half()
    q, table = torch.randn(2, heads, dim).half(), torch.tensor([[last]], dtype=torch.int32)
    out = paged_prefill(q, k_cache, v_cache, table, starts_of([2]), torch.tensor([30], dtype=torch.int32))
    k, v = (cache[last, :, :30].transpose(0, 1) for cache in (k_cache, v_cache))
    assert torch.allclose(out.double(), dense_attention(q, k, v), rtol=1e-3, atol=1e-3)


def test_no_queries():
    """Rows without queries give nothing, and launch nothing; nor does a batch of no rows."""
    cache, table = torch.zeros(1, 2, 4, 8), torch.zeros(2, 3, dtype=torch.int32)
    lens = torch.tensor([3, 0], dtype=torch.int32)
    for rows in (2, 0):
        none = torch.zeros(0, 4, 8), cache, cache, table[:rows], starts_of([0] * rows), lens[:rows]
        assert paged_prefill(*none).shape == (0, 4, 8)


def test_has_a_fake(paged):
    """The registered op tells shape and dtype of its result without computing."""
    c = paged(WHOLE, 2)
    arguments = c.q, c.k_cache, c.v_cache, c.table, starts_of([2]), c.lens
    op, checks = torch.ops.tokenspeed_rl.paged_prefill.default, ("test_schema", "test_faketensor")
    torch.library.opcheck(op, arguments, test_utils=checks)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"query_start": torch.tensor([0, 4])}, "query_start misshapen"),
        ({"q": torch.zeros(4, 3, 8)}, "multiple of its Hkv"),
        ({"window": -1}, "window must be positive"),
    ],
)
def test_misfits_are_refused(change, word):
    """What can be told without reading a device is refused."""
    arguments = {
        "q": torch.zeros(4, 4, 8),
        "k_cache": torch.zeros(5, 2, 4, 8),
        "v_cache": torch.zeros(5, 2, 4, 8),
        "page_table": torch.zeros(2, 3, dtype=torch.int32),
        "query_start": torch.tensor([0, 2, 4], dtype=torch.int32),
        "seq_lens": torch.tensor([5, 3], dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=word):
        paged_prefill(**{**arguments, **change})


@pytest.mark.parametrize("sign", [1, -1])
def test_softcap_far_out(sign):
    """Scores of 1e8 and more saturate the softcap instead of overflowing."""
    q, cache = torch.full((2, 1, 64), sign * 1e4), torch.full((1, 1, 4, 64), 1e4)
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    found = paged_prefill(q, cache, cache, table, starts_of([2]), lens, softcap=30.0)
    assert torch.equal(found, cache[0, :, :1].expand(2, 1, 64))
