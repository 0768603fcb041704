"""No kernel reads what isn't its own: guard pages behind its tensors, poison around and in them.

An op joins by a function that makes a call of it out of tensors that have been through ``place``, here.
"""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.interpreter.memory import guarded, poison, poisoned, sparse, survive
from tests.kernels.test_add_rms_norm import inputs as norm_inputs
from tests.kernels.test_rope_write_kv import inputs as rope_inputs
from tokenspeed_rl_kernels import (
    add_rms_norm,
    linear,
    linear_logprob,
    paged_decode,
    paged_prefill,
    rope_write_kv,
    sample,
    silu_mul,
)
from tokenspeed_rl_kernels.add_rms_norm import CASES as NORM_CASES
from tokenspeed_rl_kernels.rope_write_kv import CASES as ROPE_CASES


def call_silu_mul(place):
    x = place(torch.randn(3, 2 * 97))
    return lambda: silu_mul(x)


def call_add_rms_norm(place):
    x, residual, weight = (place(x) for x in norm_inputs(NORM_CASES[3], torch.float32))
    return lambda: add_rms_norm(x, residual, weight, 1e-5)


def call_rms_norm(place):
    x, weight = place(torch.randn(3, 97).half()), place(torch.randn(97).half())
    return lambda: add_rms_norm(x, None, weight, 1e-5)[0]


def call_rope_write_kv(place, case=ROPE_CASES[4]):
    *tensors, options = rope_inputs(case)
    tensors = [place(x) if i not in (5, 6) else guarded(x) for i, x in enumerate(tensors)]
    options = {name: place(x) if torch.is_tensor(x) else x for name, x in options.items()}
    return lambda: (rope_write_kv(*tensors, **options), *tensors[5:7])


def call_normed_rope(place):
    return call_rope_write_kv(place, replace(ROPE_CASES[3], tokens=5))


def call_linear(place, rows=3):
    x, weight, bias = place(torch.randn(rows, 97)), place(torch.randn(61, 97)), place(torch.randn(61))
    return lambda: linear(x, weight, bias)


def call_linear_of_one_row(place):
    return call_linear(place, 1)


def call_linear_logprob(place):
    tensors = (torch.randn(3, 37), torch.randn(211, 37), torch.randint(211, (3,)), torch.randn(211))
    hidden, weight, targets, bias = map(place, tensors)
    return lambda: linear_logprob(hidden, weight, targets, bias=bias)


def call_sample(place):
    columns = (torch.tensor([0.0, 1.0, 0.7]), torch.tensor([0, 0, 5]), torch.tensor([1.0, 0.9, 1.0]))
    more = torch.tensor([0.0, 0.0, 0.1]), torch.arange(3), torch.arange(3)
    tensors = [place(x) for x in (torch.randn(3, 301), *columns, *more)]
    return lambda: tuple(sample(*tensors))


def paged_inputs(place, queries):
    """Contexts that end within a page and with one, behind which nothing is mapped; caches without gaps."""
    q = place(torch.randn(queries, 4, 24))
    k_cache, v_cache = (guarded(torch.randn(5, 2, 4, 24)) for _ in range(2))
    table = place(torch.tensor([[1, 0, 3], [2, 4, 4]], dtype=torch.int32))
    return q, k_cache, v_cache, table


def call_paged_decode(place):
    tensors, lens = paged_inputs(place, 2), place(torch.tensor([12, 7], dtype=torch.int32))
    return lambda: paged_decode(*tensors, lens)


def call_paged_prefill(place):
    tensors, lens = paged_inputs(place, 8), place(torch.tensor([12, 7], dtype=torch.int32))
    starts = place(torch.tensor([0, 5, 8], dtype=torch.int32))
    return lambda: paged_prefill(*tensors, starts, lens)


CALLS = {
    name.removeprefix("call_"): call for name, call in sorted(globals().items()) if name.startswith("call_")
}


@pytest.fixture(params=CALLS.values(), ids=CALLS)
def make_call(request):
    """What makes an op's call."""
    torch.manual_seed(0)
    return request.param


def test_stays_within_its_tensors(make_call):
    """A read or write past the end of any argument, result or scratch is a signal."""
    survive(make_call(guarded))


def test_poison_changes_nothing(make_call, poisoned_scratch):
    """What lies around the arguments, and in fresh results and scratch, doesn't reach a result."""

    def results(place):
        torch.manual_seed(0)
        got = make_call(place)()
        return got if isinstance(got, tuple) else (got,)

    for expected, found in zip(results(torch.clone), results(poisoned), strict=True):
        assert torch.equal(expected, found)


@triton.jit
def careless_kernel(x, out, size, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at <= size, 0.0), at < size)


def careless(x):
    """A copy that reads one element past the end."""
    out = torch.empty_like(x)
    careless_kernel[(1,)](x, out, len(x), BLOCK=8)
    return out


def test_a_guard_catches_one_element():
    """The harness can fail: reading past the end by one is found, elsewhere it passes silently."""
    assert torch.equal(careless(torch.ones(7)), torch.ones(7))
    with pytest.raises(AssertionError, match=r"outside its tensors: SIG(SEGV|BUS)"):
        survive(lambda: careless(guarded(torch.ones(7))))


def test_a_fork_tells_what_went_wrong():
    """An assertion in a fork fails the test with its own words."""
    with pytest.raises(AssertionError, match="only 6 of 7"):
        survive(lambda: pytest.fail("only 6 of 7"))


def test_fresh_tensors_are_poison(poisoned_scratch):
    """Every way in which launchers make tensors without values."""
    for dtype in (torch.float32, torch.float16, torch.int32, torch.int64):
        like = torch.zeros(3, dtype=dtype)
        for fresh in (like.new_empty(3), torch.empty(3, dtype=dtype), torch.empty_like(like)):
            torch.testing.assert_close(fresh, torch.full_like(like, poison(dtype)), equal_nan=True)


def test_sparse_tensors_take_no_memory():
    """More than int32 can index, of which one page is touched."""
    big = sparse(2**16, 2**16, dtype=torch.float16)
    big[-1, -1] = 1
    assert big.numel() > 2**31 and big[-1, -2:].tolist() == [0, 1]
