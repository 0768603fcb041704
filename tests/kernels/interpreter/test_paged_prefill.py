"""Prefill attention in Triton."""

import pytest
import torch

from tokenspeed_rl_kernels.paged_prefill import CASES, paged_prefill, reference

SMALL = [case for case in CASES if sum(case.queries) < 500]


def starts_of(case):
    return torch.tensor([0, *case.queries], dtype=torch.int32).cumsum(0).int()


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_equals_dense_attention(case, dtype, paged, check_exact):
    """Every group size, head dim, page size, past and option is exact, though unused slots are NaN."""
    c, starts = paged(case, sum(case.queries), dtype), starts_of(case)
    inputs = c.table, starts, c.lens
    ours = paged_prefill(c.q, c.k_cache, c.v_cache, *inputs, **c.options)
    exact, plain = (
        reference(*(x.to(wide) for x in (c.q, c.k_cache, c.v_cache)), *inputs, **c.options)
        for wide in (torch.float64, dtype)
    )
    check_exact(ours, plain, exact)
