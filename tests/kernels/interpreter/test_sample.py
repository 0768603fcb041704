"""Draws in Triton: the CPU's tokens, logprobs of three kinds, and rows that depend on nothing else."""

import pytest
import torch

from tokenspeed_rl_kernels.gpu import sample as gpu
from tokenspeed_rl_kernels.sample import BLOCK, CASES, sample, sample_columns

FILTERED = {"top_k": 20, "top_p": 0.9, "min_p": 0.02}


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    """Scratch of a size that keeps the interpreter quick."""
    monkeypatch.setattr(gpu, "CAPACITY", 512)
    gpu.builds.cache_clear()
    yield
    gpu.builds.cache_clear()


@pytest.fixture
def on_cpu(monkeypatch):
    """`sample` by its CPU path."""

    def call(*arguments):
        with monkeypatch.context() as patch:
            patch.setitem(sample.__globals__, "runs_triton", lambda tensor: False)
            return sample(*arguments)

    return call


def columns(rows, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=None, positions=None):
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.arange(rows) if seeds is None else seeds,
        torch.zeros(rows, dtype=torch.int64) if positions is None else positions,
    )


def random_logits(rows, vocab, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def assert_same(ours, theirs, atol=2e-6):
    assert torch.equal(ours.tokens, theirs.tokens)
    for ours_logprob, theirs_logprob in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(ours_logprob, theirs_logprob, rtol=1e-6, atol=atol, equal_nan=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_cpu(case, on_cpu):
    """Every case draws the CPU's tokens, with its logprobs to rounding."""
    options = {name: getattr(case, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    rows, peaked = (1, 4) if case.vocab > 10_000 else (case.rows, 1)  # so that few tokens rank high
    arguments = random_logits(rows, case.vocab) * peaked, *columns(rows, **options)
    assert_same(sample(*arguments), on_cpu(*arguments))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_many_draws_equal_the_cpu_s(temperature, on_cpu):
    """Seeds of any sign and size, any position: each token the CPU's; they follow the distribution."""
    rows = 100
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=torch.Generator().manual_seed(1))
    settings = columns(rows, temperature=temperature, seeds=seeds, positions=torch.arange(rows) * 1_000_003)
    logits = torch.full((1, 300), -9.0)
    logits[0, [3, 255, 256, 299]] = torch.tensor([0.0, 0.5, 1.0, 0.0])
    arguments = logits.expand(rows, -1), *settings
    ours = sample(*arguments)
    assert_same(ours, on_cpu(*arguments))
    expected = (logits[0].double() / temperature).softmax(0)
    counts = torch.bincount(ours.tokens, minlength=300)
    drawn = torch.cat((counts[[3, 255, 256, 299]], (rows - counts[[3, 255, 256, 299]].sum())[None]))
    chances = torch.cat((expected[[3, 255, 256, 299]], (1 - expected[[3, 255, 256, 299]].sum())[None]))
    assert float(((drawn - rows * chances).square() / (rows * chances)).sum()) < 4 + 5 * 8**0.5


def test_draws_are_pinned():
    """The draws that the CPU's test pins."""
    seeds = torch.tensor([0, 0, 1, -1, 2**62, -(2**63)])
    settings = columns(6, seeds=seeds, positions=torch.tensor([0, 1, 0, 0, 5, 10**9]))
    tokens = sample(torch.linspace(-2, 2, 1000).repeat(6, 1), *settings).tokens
    assert tokens.tolist() == [814, 677, 797, 718, 929, 369]


@pytest.mark.parametrize("vocab", [1, 7, 256, 257, 5000])
def test_logprobs_are_log_softmaxes(vocab):
    """F1, F2, F3: against float64, of a greedy, a plain, a cool, a hot and a filtered row."""
    logits = random_logits(5, vocab, seed=vocab)
    settings = list(columns(5))
    settings[0] = torch.tensor([0.0, 1.0, 0.3, 1e4, 0.8])
    settings[1][4], settings[3][4] = 3, 0.1
    out = sample(logits, *settings)
    exact = logits.double()
    scaled = exact / torch.tensor([1.0, 1.0, 0.3, 1e4, 0.8], dtype=torch.float64)[:, None]
    kept = scaled.clone()
    third = kept[4].topk(min(3, vocab)).values[-1]
    kept[4, (kept[4] < third) | (kept[4] < kept[4].max() - 2.302585)] = -torch.inf
    for ours, of in zip(out[1:], (exact, scaled, kept), strict=True):
        expected = of.log_softmax(1).gather(1, out.tokens[:, None])[:, 0]
        torch.testing.assert_close(ours.double(), expected, rtol=2e-7, atol=2e-6)
    assert out.tokens[0] == logits[0].argmax()


@pytest.mark.parametrize("options", [{}, FILTERED], ids=["plain", "filtered"])
def test_a_row_depends_on_nothing_but_itself(options):
    """F4, F12: to the bit, in any place of any batch, alone, and beside rows of NaN."""
    logits = random_logits(6, 700)
    settings = columns(6, temperature=0.8, **options)
    together = sample(logits, *settings)
    order = torch.tensor([4, 0, 5, 2])
    poisoned = torch.full((4, 2, 700), torch.nan)
    poisoned[:, 0] = logits[order]
    twice = [column[order].repeat_interleave(2) for column in settings]
    for ours, theirs in zip(sample(poisoned.flatten(0, 1), *twice), together, strict=True):
        assert torch.equal(ours[::2], theirs[order])
    for ours, theirs in zip(sample(logits[3:4], *(c[3:4] for c in settings)), together, strict=True):
        assert torch.equal(ours, theirs[3:4])


@pytest.mark.parametrize("vocab", [1, 255, 257])
def test_nothing_is_read_past_a_row(vocab):
    """Rows of a padded vocabulary, whose padding is NaN, are what they are without: no copy is made."""
    padded = torch.full((3, vocab + 30), torch.nan)
    padded[:, :vocab] = random_logits(3, vocab)
    for options in ({}, FILTERED, {"temperature": 0.0}):
        settings = columns(3, **options)
        ours, theirs = sample(padded[:, :vocab], *settings), sample(padded[:, :vocab].contiguous(), *settings)
        assert bool((ours.tokens >= 0).all()) and torch.equal(ours.tokens, theirs.tokens)
        assert torch.equal(ours.logprob_processed, theirs.logprob_processed)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"temperature": 0.7, "top_p": 0.9}])
def test_rows_that_nothing_can_be_drawn_from(options):
    """F7: NaN, all -inf or +inf logits give token -1 and NaN logprobs, and leave the other rows alone."""
    logits = random_logits(7, 600)
    broken = logits.clone()
    broken[0], broken[1, 17], broken[2] = torch.nan, torch.nan, -torch.inf
    broken[3, 3], broken[4, 599], broken[5, :256] = torch.inf, torch.nan, torch.inf
    out, fine = (sample(x, *columns(7, **options)) for x in (broken, logits))
    assert out.tokens[:6].tolist() == [-1] * 6
    assert all(logprob[:6].isnan().all() for logprob in out[1:])
    assert all(torch.equal(ours[6], theirs[6]) for ours, theirs in zip(out, fine, strict=True))


@pytest.mark.parametrize("options", [{}, FILTERED, {"temperature": 0.0}, {"temperature": 1e-6}])
def test_one_possible_token(options):
    """One finite logit, or one far above all others, is drawn with logprob 0, wherever it stands."""
    logits = torch.full((8, 300), -torch.inf)
    logits[4:] = -3e38
    places = torch.tensor([0, 255, 256, 299]).repeat(2)
    logits[torch.arange(8), places] = -50.0
    out = sample(logits, *columns(8, **options))
    assert torch.equal(out.tokens, places)
    assert all(torch.equal(logprob, torch.zeros(8)) for logprob in out[1:])


def test_extreme_temperatures():
    """Dividing by 1e-38 gives the argmax with logprob 0; at 1e4 all tokens are nearly equal."""
    logits = random_logits(2, 300)
    settings = columns(2)
    settings[0][:] = torch.tensor([1e-38, 1e4])
    out = sample(logits, *settings)
    assert out.tokens[0] == logits[0].argmax() and out.logprob_sampling[0] == 0.0
    assert abs(out.logprob_sampling[1].item() + torch.tensor(300.0).log().item()) < 1e-2


def test_greedy_ties():
    """The lowest id of equal logits, within a block and across blocks."""
    logits = torch.zeros(2, 2 * BLOCK + 3)
    logits[0, [BLOCK + 1, BLOCK, 2 * BLOCK + 2]] = 1.0
    logits[1, [2 * BLOCK, 2 * BLOCK + 1]] = 1.0
    assert sample(logits, *columns(2, temperature=0.0)).tokens.tolist() == [BLOCK, 2 * BLOCK]


def test_a_large_vocabulary():
    """Sums over 131072 tokens don't drift: a flat row's logprobs are -log(131072)."""
    out = sample(torch.full((1, 131072), 5.0), *columns(1, temperature=0.5))
    exact = -torch.tensor(131072.0).log()
    for logprob in out[1:]:
        torch.testing.assert_close(logprob, exact[None], rtol=2e-7, atol=0)


def test_no_rows():
    """An empty batch launches nothing."""
    assert [len(column) for column in sample(torch.zeros(0, 300), *columns(0))] == [0] * 4


def test_columns_of_any_stride_and_width():
    """int32 top-k, strided and broadcast columns, transposed logits."""
    logits = random_logits(3, 300)
    plain = sample(logits, *columns(3, temperature=0.7, top_k=5))
    heat, top_k, top_p, min_p, seeds, positions = columns(3, temperature=0.7, top_k=5)
    odd = heat[:1].expand(3), top_k.int(), top_p, min_p, seeds.repeat_interleave(2)[::2], positions
    assert_same(sample(logits.t().contiguous().t(), *odd), plain, atol=0)


def test_is_an_op():
    """Registered, with a fake of the right shapes and dtypes; too large a vocabulary is refused."""
    arguments = random_logits(3, 300), *columns(3)
    torch.library.opcheck(torch.ops.tokenspeed_rl.sample_columns.default, arguments)
    assert all(
        torch.equal(*pair) for pair in zip(sample(*arguments), sample_columns(*arguments), strict=True)
    )
    with pytest.raises(ValueError, match="vocabulary empty or too large: got 1048577"):
        sample(torch.zeros(1, 1).expand(1, 2**20 + 1), *columns(1))
