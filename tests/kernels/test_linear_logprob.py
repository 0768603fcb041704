"""Logprobs and entropies without logits: values, gradients, memory, refusals."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint

from tests.kernels.logprobs import gradients, inputs
from tokenspeed_rl_kernels import vocab_parts
from tokenspeed_rl_kernels.cpu import linear_logprob as cpu
from tokenspeed_rl_kernels.linear_logprob import CASES, linear_logprob, reference

CASE = next(case for case in CASES if case.name == "odd")


@pytest.fixture
def small_parts(monkeypatch):
    """So small that every case has several."""
    monkeypatch.setattr(vocab_parts, "COLUMNS", 16)
    monkeypatch.setattr(cpu, "ELEMENTS", 200)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference(case, dtype, small_parts, check_exact):
    """Both results and all gradients are those of the whole tensor of logits, and no less exact."""
    arguments, options = inputs(case, dtype)
    exact = gradients(reference, arguments, options, torch.float64)
    torchs = gradients(reference, arguments, options, dtype)
    for ours, theirs, wanted in zip(
        gradients(linear_logprob, arguments, options, dtype), torchs, exact, strict=True
    ):
        assert ours.dtype == theirs.dtype
        check_exact(ours, theirs, wanted)


def test_float64(small_parts):
    """Nothing is rounded to float32 on the way."""
    arguments, options = inputs(CASE, torch.float64)
    exact = gradients(reference, arguments, options, torch.float64)
    for ours, wanted in zip(gradients(linear_logprob, arguments, options, torch.float64), exact, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-11, atol=1e-11)


def test_gradcheck(small_parts):
    """Finite differences in float64, of logprob alone, entropy alone and both."""
    (hidden, weight, targets), options = inputs(CASE, torch.float64)
    tensors = [t[:, :5].clone().requires_grad_() for t in (hidden[:3], weight[:40])]
    bias = options["bias"][:40].clone().requires_grad_()
    for wanted in ([0], [1], [0, 1]):

        def chosen(hidden, weight, bias, wanted=wanted):
            results = linear_logprob(hidden, weight, targets[:3] % 40, bias=bias, temperature=0.7)
            return [results[i] for i in wanted]

        assert torch.autograd.gradcheck(chosen, (*tensors, bias))


class Largest(TorchDispatchMode):
    """Records how many elements the largest result of any operation has."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = (leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor))
        self.elements = max(self.elements, *(t.numel() for t in tensors), 0)
        return result


def test_no_tensor_of_all_logits_exists(monkeypatch):
    """Neither forwards nor backwards. Seen from within: outside there are two ops."""
    monkeypatch.setattr(cpu, "ELEMENTS", 64 * 128)
    hidden, weight, targets = torch.randn(64, 4), torch.randn(2000, 4), torch.arange(64)
    with Largest() as ours:
        cpu.forward(hidden, weight, None, targets, 1.0)
        cpu.backward(hidden, weight, None, targets, torch.randn(5, 64), 1.0, [True] * 3)
    assert ours.elements == 64 * 128
    with Largest() as theirs:
        reference(hidden, weight, targets)
    assert theirs.elements == 64 * 2000


def test_a_part_is_16_mebibytes():
    """The most logits that exist at a time."""
    for tokens in (1, 100, 4096, 32768):
        widest = max(part.stop - part.start for part in vocab_parts.parts(tokens, 151936, cpu.ELEMENTS))
        assert tokens * widest * 4 <= 16 * 2**20


def test_extreme_logits(small_parts, check_exact):
    """Logits of +-1e4, and a bias of -inf on one token and on a whole part: as exact as torch, and no NaN."""
    weight = torch.cat((torch.full((50, 1), -1e4), torch.full((1, 1), 1e4), torch.zeros(49, 1)))
    bias = torch.zeros(100)
    bias[[3, *range(16, 48)]] = -torch.inf
    hidden = torch.tensor([[1.0], [-1.0], [0.0]])
    targets = torch.tensor([50, 0, 99])
    arguments, options = (hidden, weight, targets), {"bias": bias, "temperature": 1.0}
    exact = gradients(reference, arguments, options, torch.float64)
    torchs = gradients(reference, arguments, options, torch.float32)
    for ours, theirs, wanted in zip(
        gradients(linear_logprob, arguments, options, torch.float32), torchs, exact, strict=True
    ):
        check_exact(ours, theirs, wanted)
    assert linear_logprob(hidden[:1], weight, targets[:1], bias=bias)[1].tolist() == [0.0]


def test_only_what_is_wanted_gets_a_gradient():
    """A frozen head or frozen hidden states cost nothing."""
    (hidden, weight, targets), options = inputs(CASE)
    for i in range(2):
        tensors = [t.clone().requires_grad_(i == j) for j, t in enumerate((hidden, weight))]
        linear_logprob(*tensors, targets, **options)[0].sum().backward()
        assert [t.grad is not None for t in tensors] == [i == 0, i == 1]


def test_composes():
    """No gradient, gradient checkpointing, and autocast change nothing."""
    (hidden, weight, targets), options = inputs(CASE)
    plain = gradients(linear_logprob, (hidden, weight, targets), options, torch.float32)

    def checkpointed(*args, **kwargs):
        return checkpoint(linear_logprob, *args, use_reentrant=False, **kwargs)

    def autocast(*args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return linear_logprob(*args, **kwargs)

    for function in (checkpointed, autocast):
        for a, b in zip(
            gradients(function, (hidden, weight, targets), options, torch.float32), plain, strict=True
        ):
            assert torch.equal(a, b)
    with torch.no_grad():
        logprob, entropy = linear_logprob(hidden.requires_grad_(), weight, targets, **options)
    assert not logprob.requires_grad and torch.equal(logprob, plain[0]) and torch.equal(entropy, plain[1])


def test_compiles_to_ops():
    """Both halves are ops with fakes."""
    (hidden, weight, targets), options = inputs(CASE)
    ops, rest = torch.ops.tokenspeed_rl, (options["bias"], targets)
    torch.library.opcheck(ops.linear_logprob_forward.default, (hidden, weight, *rest, 0.7))
    rows = torch.randn(5, len(targets))
    for wanted in ([True, True, True], [False, True, False]):
        torch.library.opcheck(ops.linear_logprob_backward.default, (hidden, weight, *rest, rows, 0.7, wanted))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 4)}, "shapes misfit: got hidden"),
        ({"weight": torch.zeros(5)}, "shapes misfit: got hidden"),
        ({"weight": torch.zeros(5, 3).double()}, "dtypes differ"),
        ({"bias": torch.zeros(3)}, "shapes misfit: got weight"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, "targets misfit"),
        ({"targets": torch.zeros(2, dtype=torch.int32)}, "targets misfit"),
        ({"targets": torch.tensor([0, -100])}, "target out of range: got -100"),
        ({"targets": torch.tensor([5, 0])}, "target out of range: got 5"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": math.nan}, "temperature must be positive"),
    ],
)
def test_misfits_are_refused(change, message):
    """With what was given."""
    arguments = {"hidden": torch.zeros(2, 3), "weight": torch.zeros(5, 3), "targets": torch.tensor([0, 4])}
    linear_logprob(**arguments)
    with pytest.raises(ValueError, match=message):
        linear_logprob(**(arguments | change))
