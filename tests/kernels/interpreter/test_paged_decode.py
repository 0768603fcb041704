"""Decode attention in Triton."""

import pytest
import torch

from tokenspeed_rl_kernels.paged_decode import CASES, paged_decode


def run(c, **changes):
    return paged_decode(
        c.q, c.k_cache, c.v_cache, c.table, c.lens, **{**c.options, "shared": c.shared, **changes}
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_dense_attention(case, dtype, paged, dense_attention, check_exact):
    """Every group size, head dim, page size and option is exact, with NaN in all slots that are not used."""
    c = paged(case, len(case.lens), dtype)
    rows = list(zip(c.q, c.keys, c.values, strict=True))
    exact = torch.cat([dense_attention(q[None], k, v, **c.options) for q, k, v in rows])
    plain = torch.cat([dense_attention(q[None], k, v, **c.options, dtype=dtype) for q, k, v in rows])
    check_exact(run(c), plain, exact)
