"""Prefill attention over pages: right for whole prompts, chunks, windows, and for any cut into chunks."""

import pytest
import torch

from tokenspeed_rl_kernels.paged_decode import paged_decode
from tokenspeed_rl_kernels.paged_prefill import CASES, Case, paged_prefill, reference


def starts_of(case):
    return torch.tensor([0, *case.queries], dtype=torch.int32).cumsum(0).int()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_dense_attention(case, paged, dense_attention, check_exact):
    """Every group size, head dim, page size, past and option is exact, though unused slots are NaN."""
    c, starts = paged(case, sum(case.queries)), starts_of(case)
    ours = paged_prefill(c.q, c.k_cache, c.v_cache, c.table, starts, c.lens, **c.options)
    slow = reference(c.q, c.k_cache, c.v_cache, c.table, starts, c.lens, **c.options)
    if sum(case.queries) > 500:  # the dense loop goes query by query: hold the reference against a few
        torch.testing.assert_close(ours, slow, rtol=0, atol=2e-6)
        few = [0, 1, 511, 512, 513, case.queries[0] - 1]
    else:
        few = None
    for row, (k, v) in enumerate(zip(c.keys, c.values, strict=True)):
        span = slice(int(starts[row]), int(starts[row + 1]))
        for i in [None] if few is None else few:
            if i is not None and i >= case.queries[row]:
                continue
            part = span if i is None else slice(span.start + i, span.start + i + 1)
            length = len(k) if i is None else len(k) - case.queries[row] + i + 1
            dense = [
                dense_attention(c.q[part], k[:length], v[:length], **c.options, dtype=dtype)
                for dtype in (torch.float32, torch.float64)
            ]
            check_exact(ours[part], *dense)
            check_exact(slow[part], *dense)


def test_half_precision_accumulates_in_float32(paged, dense_attention):
    """bfloat16 inputs lose no more than the rounding of the result."""
    case = Case(name="half", queries=(70, 5), lens=(70, 40))
    c = paged(case, 75, torch.bfloat16)
    ours = paged_prefill(c.q, c.k_cache, c.v_cache, c.table, starts_of(case), c.lens)
    rows = zip((c.q[:70], c.q[70:]), c.keys, c.values, strict=True)
    exact = torch.cat([dense_attention(q, k, v) for q, k, v in rows])
    assert torch.allclose(ours.double(), exact, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-6)


@pytest.mark.parametrize("block", [1, 7, 64])
def test_query_blocks_change_nothing(block, paged, monkeypatch):
    """Queries are taken in blocks to bound the mask; the cuts move a result by rounding at most."""
    case = Case(name="blocks", queries=(50, 20), lens=(50, 60), window=13)
    c = paged(case, 70)
    expected = paged_prefill(c.q, c.k_cache, c.v_cache, c.table, starts_of(case), c.lens, window=13)
    monkeypatch.setattr("tokenspeed_rl_kernels.cpu.paged_prefill.QUERY_BLOCK", block)
    ours = paged_prefill(c.q, c.k_cache, c.v_cache, c.table, starts_of(case), c.lens, window=13)
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [None, 9])
def test_chunks_and_decode_agree_with_the_whole(window, paged):
    """F9: a prompt taken whole, in chunks, or token by token gives the same, up to rounding."""
    case = Case(name="whole", queries=(40,), lens=(40,), heads=6, kv_heads=2)
    c = paged(case, 40)

    def part(start, stop):
        bounds = torch.tensor([0, stop - start])
        lens = torch.tensor([stop])
        return paged_prefill(c.q[start:stop], c.k_cache, c.v_cache, c.table, bounds, lens, window=window)

    whole = part(0, 40)
    for size in (1, 3, 16, 39):
        chunked = torch.cat([part(start, min(start + size, 40)) for start in range(0, 40, size)])
        torch.testing.assert_close(chunked, whole, rtol=0, atol=2e-6)
    decoded = torch.cat(
        [
            paged_decode(c.q[i, None], c.k_cache, c.v_cache, c.table, torch.tensor([i + 1]), window=window)
            for i in range(40)
        ]
    )
    torch.testing.assert_close(decoded, whole, rtol=0, atol=2e-6)


def test_a_row_alone_equals_the_row_in_a_batch(paged):
    """F12: rows are computed one by one, so batch mates change nothing, bit for bit."""
    case = next(case for case in CASES if case.name == "chunks")
    c, starts = paged(case, sum(case.queries)), starts_of(case)
    together = paged_prefill(c.q, c.k_cache, c.v_cache, c.table, starts, c.lens)
    for row, count in enumerate(case.queries):
        span = slice(int(starts[row]), int(starts[row + 1]))
        row_only = c.table[row, None], torch.tensor([0, count]), c.lens[row, None]
        assert torch.equal(paged_prefill(c.q[span], c.k_cache, c.v_cache, *row_only), together[span])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"query_start": torch.tensor([0, 4])}, "query_start misshapen"),
        ({"query_start": torch.tensor([0, 4, 3])}, "rise from 0"),
        ({"query_start": torch.tensor([1, 2, 4])}, "rise from 0"),
        ({"query_start": torch.tensor([0, 2, 3])}, "misses the end of q"),
        ({"seq_lens": torch.tensor([1, 3])}, "row 0 out of range: got 1"),
        ({"seq_lens": torch.tensor([2, 13])}, "row 1 out of range: got 13"),
        ({"q": torch.zeros(4, 3, 8)}, "multiple of its Hkv"),
        ({"window": -1}, "window must be positive"),
    ],
)
def test_misfits_are_refused(change, word):
    """A misfit raises ValueError that says what is wrong and what it got."""
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
