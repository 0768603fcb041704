"""Decode attention in Triton: right, blind to what it must not see, the same bits whatever is beside."""

import pytest
import torch
import triton
import triton.language as tl

from tokenspeed_rl_kernels.attention_options import AttentionOptions
from tokenspeed_rl_kernels.decode_work import DecodeWork, Sharing, max_splits
from tokenspeed_rl_kernels.gpu.attention_tile import merge
from tokenspeed_rl_kernels.gpu.paged_decode import DecodeScratch, decode_with
from tokenspeed_rl_kernels.paged_decode import CASES, Case, paged_decode, reference
from tokenspeed_rl_kernels.step_metadata import step_metadata

MORE_CASES = (
    Case(name="group 16", lens=(20, 7), heads=16, kv_heads=1),
    Case(name="group 40", lens=(20, 7), heads=40, kv_heads=1),
    Case(name="dim 128", lens=(50, 7), heads=2, kv_heads=2, dim=128),
    Case(name="dim 256", lens=(20, 7), heads=2, kv_heads=1, dim=256),
    Case(name="splits", lens=(255, 256, 257, 600), dim=16),
    Case(name="splits, sinks, softcap", lens=(600, 0), dim=16, sinks=True, softcap=5.0),
    Case(name="a prefix of several splits", lens=(530, 512, 600, 700, 520), dim=16, prefix=(512,)),
    Case(name="a window shorter than the prefix", lens=(800, 513, 512), dim=16, prefix=(512,), window=9),
)
ALSO_FLOAT32 = {"ragged", "group 6", "values of another dim", "softcap", "sinks", "splits"}
RUNS = [pytest.param(case, torch.float16, id=case.name) for case in (*CASES, *MORE_CASES)] + [
    pytest.param(case, torch.float32, id=f"{case.name}, float32")
    for case in (*CASES, *MORE_CASES)
    if case.name in ALSO_FLOAT32
]
SPLITS = Case(name="several splits", lens=(300, 0, 513, 31, 256), heads=6, kv_heads=2, dim=16)
SHARED = Case(name="shared splits", lens=(530, 600, 512, 700, 520, 20), dim=16, prefix=(512, 272))


def run(c, **changes):
    return paged_decode(
        c.q, c.k_cache, c.v_cache, c.table, c.lens, **{**c.options, "shared": c.shared, **changes}
    )


def exact_and_plain(c):
    """The reference in float64, and in the dtype of the inputs."""
    return (
        reference(*(x.to(wide) for x in (c.q, c.k_cache, c.v_cache)), c.table, c.lens, **c.options)
        for wide in (torch.float64, c.q.dtype)
    )


@pytest.mark.parametrize(("case", "dtype"), RUNS)
def test_equals_dense_attention(case, dtype, paged, check_exact):
    """Every group size, head dim, page size and option is exact, with NaN in all slots that are not used."""
    c = paged(case, len(case.lens), dtype)
    exact, plain = exact_and_plain(c)
    check_exact(run(c), plain, exact)


@pytest.mark.parametrize("window", [1, 2, 255, 256, 257, 300, 10**10])
def test_windows(window, paged, check_exact):
    """Windows are exact to the token: shorter than a split, at the splits' borders, longer than all."""
    c = paged(Case(name="windows", lens=(600, 257, 512, 1), dim=16, heads=2, window=window), 4)
    exact, plain = exact_and_plain(c)
    check_exact(run(c), plain, exact)


def test_a_row_is_the_same_in_any_batch(paged):
    """F12: batch mates, their order, the table's width and where pages lie change no bit of a row."""
    c = paged(SPLITS, 5)
    together = run(c)
    order, pages = torch.tensor([3, 0, 4, 2, 1]), torch.arange(len(c.k_cache)).flip(0)
    wide = torch.cat((c.table, torch.full((5, 40), 2**31 - 1, dtype=torch.int32)), 1)
    shuffled = run(c, shared=None)[order]
    assert torch.equal(paged_decode(c.q[order], c.k_cache, c.v_cache, wide[order], c.lens[order]), shuffled)
    moved = torch.where(c.table < len(pages), len(pages) - 1 - c.table, c.table)
    assert torch.equal(paged_decode(c.q, c.k_cache[pages], c.v_cache[pages], moved, c.lens), together)
    for row in range(5):
        one = slice(row, row + 1)
        alone = paged_decode(c.q[one], c.k_cache, c.v_cache, c.table[one], c.lens[one])
        assert torch.equal(alone, together[one])


@pytest.mark.parametrize("window", [None, 1, 100, 300])
def test_sharing_a_prefix_changes_no_bit(window, paged):
    """Whole splits of a prefix are read once for several rows, with what each would have computed itself."""
    c = paged(SHARED, 6)
    c.options["window"] = window
    assert torch.equal(run(c), run(c, shared=None))


def test_a_prefix_is_read_once(paged):
    """Of rows that read together, only the first looks up its pages: the others' entries may be anything."""
    c = paged(SHARED, 6)
    expected = run(c)
    c.table[3, : 512 // 16] = 2**31 - 1  # row 0 reads it
    assert torch.equal(run(c), expected)


def test_a_broken_request_stays_alone(paged):
    """F7: NaN in one row's query, keys or values reaches no other row, not even by a shared prefix."""
    c = paged(SHARED, 6)
    expected = run(c)
    c.q[0] = torch.nan
    c.v_cache[c.table[1, 30]] = torch.nan
    broken = run(c)
    assert broken[:2].isnan().all()
    assert torch.equal(broken[2:], expected[2:])


@triton.jit
def merge_one_kernel(states, out):
    """states [2, 3]: (top, mass, acc) of two states -> out [3]."""
    one = tl.arange(0, 1)
    top, mass, acc = tl.load(states + one), tl.load(states + 1 + one), tl.load(states + 2 + one)
    last = tl.load(states + 3 + one), tl.load(states + 4 + one), tl.load(states + 5 + one)
    top, mass, acc = merge(top, mass, acc[:, None], last[0], last[1], last[2][:, None])
    tl.store(out + one, top)
    tl.store(out + 1 + one, mass)
    tl.store(out + 2 + one[:, None], acc)


def test_merging_with_nothing():
    """Two empty states merge to an empty one, without NaN; with an empty one, a state stays what it is."""
    empty, state, out = (-torch.inf, 0.0, 0.0), (-1e30, 3.0, 7.0), torch.empty(3)
    for one, other in ((empty, empty), (empty, state), (state, empty)):
        merge_one_kernel[(1,)](torch.tensor([one, other]), out)
        assert tuple(out.tolist()) == pytest.approx(max(one, other), rel=1e-6)


def test_offsets_beyond_2_to_the_31(dense_attention):
    """Page ids are widened before they are multiplied: a cache of more than 2^31 elements works."""
    torch.manual_seed(0)
    heads, size, dim = 8, 256, 256
    pages = 2**31 // (heads * size * dim) + 2
    k_cache, v_cache = (torch.empty(pages, heads, size, dim, dtype=torch.float16) for _ in range(2))
    last = pages - 1  # only this page is ever touched
    k_cache[last], v_cache[last] = torch.randn(2, heads, size, dim).half()
    q, table = torch.randn(1, heads, dim).half(), torch.tensor([[last]], dtype=torch.int32)
    out = paged_decode(q, k_cache, v_cache, table, torch.tensor([40], dtype=torch.int32))
    k, v = (cache[last, :, :40].transpose(0, 1) for cache in (k_cache, v_cache))
    assert torch.allclose(out.double(), dense_attention(q, k, v), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("sign", [1, -1])
def test_softcap_far_out(sign):
    """Scores of 1e8 and more saturate the softcap instead of overflowing."""
    q, cache = torch.full((1, 1, 64), sign * 1e4), torch.full((1, 1, 4, 64), 1e4)
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    assert torch.equal(paged_decode(q, cache, cache, table, lens, softcap=30.0), cache[0, :, :1])


def test_one_launch_serves_any_lengths(paged):
    """What a captured graph replays: buffers and grids stay; lengths cross a split's border, a row joins."""
    c = paged(Case(name="growing", lens=(258, 40, 300), dim=16), 3)
    lens = torch.tensor([254, -1, 100], dtype=torch.int32)
    splits = max_splits(c.table.shape[1], 16)
    work = DecodeWork.empty(Sharing.none(3, "cpu"), splits)
    scratch = DecodeScratch.empty(3, 4, splits + 1, 16, "cpu")
    positions, slots = torch.empty(2, 3, dtype=torch.int64)
    for step in range(4):
        if step == 2:
            lens[1] = 5
        for part in scratch:
            part.fill_(torch.nan)
        step_metadata(lens, c.table, work, positions, slots, page_size=16, advance=True)
        out = decode_with(c.q, c.k_cache, c.v_cache, c.table, lens, work, scratch, AttentionOptions())
        assert torch.equal(out, paged_decode(c.q, c.k_cache, c.v_cache, c.table, lens.clamp(min=0)))


def test_no_rows():
    """A batch of nothing gives nothing, and launches nothing."""
    cache, empty = torch.zeros(1, 2, 4, 8), torch.zeros(0, 3, dtype=torch.int32)
    assert paged_decode(torch.zeros(0, 4, 8), cache, cache, empty, empty[:, 0]).shape == (0, 4, 8)


def test_has_a_fake(paged):
    """The registered op tells shape and dtype of its result without computing."""
    c = paged(CASES[0], 1)
    names = ("scale", "window", "softcap", "sinks", "prefix_pages", "prefix_lens", "group_of_row")
    arguments = (c.q, c.k_cache, c.v_cache, c.table, c.lens), dict.fromkeys(names)
    op, checks = torch.ops.tokenspeed_rl.paged_decode.default, ("test_schema", "test_faketensor")
    torch.library.opcheck(op, *arguments, test_utils=checks)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"q": torch.zeros(2, 3, 8)}, "multiple of its Hkv"),
        ({"q": torch.zeros(2, 4, 8, dtype=torch.float16)}, "dtypes differ"),
        ({"seq_lens": torch.tensor([1])}, "page table misfits"),
        ({"window": 0}, "window must be positive"),
        ({"shared": (torch.zeros(1, 1), torch.tensor([4]), torch.tensor([0]))}, "shared misshapen"),
    ],
)
def test_misfits_are_refused(change, word):
    """What can be told without reading a device is refused."""
    arguments = {
        "q": torch.zeros(2, 4, 8),
        "k_cache": torch.zeros(5, 2, 4, 8),
        "v_cache": torch.zeros(5, 2, 4, 8),
        "page_table": torch.zeros(2, 3, dtype=torch.int32),
        "seq_lens": torch.tensor([5, 3], dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=word):
        paged_decode(**{**arguments, **change})
