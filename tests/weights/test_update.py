"""An update writes exactly what it was given, or nothing: every form, order, bucketing and failure."""

from __future__ import annotations

import gc
import itertools
import os
import random
import weakref

import pytest
import torch

from tokenspeed_rl.errors import EngineStateError, WeightUpdateError
from tokenspeed_rl.weights import WeightUpdate, checksum, flatten, randomise
from tokenspeed_rl.weights.bucket import buckets

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Rig:
    """A store with weights W0, and the reference sets W0 and W1 as transformers names them."""

    def __init__(self, tiny, family="Qwen2", dtype=torch.float32, **changes):
        self.tiny = tiny
        self.models = [tiny.model(family, seed, **changes) for seed in (0, 1)]
        self.w0, self.w1 = ({n: p.detach().to(dtype) for n, p in m.named_parameters()} for m in self.models)
        self.store = tiny.store(self.models[0].config, dtype)
        randomise(self.store, seed=0, std=0.02)
        self.update(self.w0, label="w0")
        self.places = {name: tensors[0].data_ptr() for name, tensors in self.store.weights.items()}

    def update(self, named, *, whole=True, fail="the source broke", **options):
        """As the engine runs it; the receipt, or the error after `fail`."""
        update = WeightUpdate(self.store, kind="tensor", **options)
        try:
            pairs = list(named.items() if isinstance(named, dict) else named) if whole else named
            if whole:
                update.check_whole(pairs)
            update.run(pairs)
            return update.commit()
        except BaseException:
            update.fail(fail)
            raise

    def state(self):
        version = self.store.version
        return (version.epoch, version.label, version.commits, version.reason, dict(version.arrived("v1")))

    def holds(self, weights) -> bool:
        assert {name: tensors[0].data_ptr() for name, tensors in self.store.weights.items()} == self.places
        return self.tiny.same_bits(self.tiny.held(self.store), weights)


@pytest.fixture
def rig(tiny):
    return Rig(tiny)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("form", ["whole", "stream", "buckets"])
def test_any_bucketing_in_any_order_gives_the_same_weights(tiny, family, size, form):
    """E1: 1, 2, 7 or all at once, shuffled, q, k, v apart: the reference's bits, and one checksum."""
    rig = Rig(tiny, family)
    for seed in range(3):
        named = list(rig.w1.items())
        random.Random(seed).shuffle(named)
        groups = [named[at : at + size] for at in range(0, len(named), size)]
        if form == "buckets":
            source = (pair for group in groups for pair in flatten(group).tensors())
        else:
            source = (pair for group in groups for pair in group)
        receipt = rig.update(source, whole=form == "whole")
        assert rig.holds(rig.w1) and receipt.checksum == checksum(rig.w1)
        assert receipt.loaded == tuple(rig.store.names.hf_names) and receipt.missing == ()
        assert receipt.bytes == rig.store.nbytes and receipt.kind == "tensor" and receipt.seconds > 0
        rig.update(rig.w0)
        assert rig.holds(rig.w0)


def test_the_senders_buckets_arrive_whole(rig):
    """E1, E11: whatever their size, and though the sender reuses its memory for the next bucket."""
    for bucket_bytes in (1, 100, 5000, 1 << 30):

        def stream(bucket_bytes=bucket_bytes):
            for bucket in buckets(rig.w1, bucket_bytes):
                yield from bucket.tensors()
                bucket.data.fill_(255)

        rig.update(stream(), whole=False)
        assert rig.holds(rig.w1)
        rig.update(rig.w0)


Q0 = "model.layers.0.self_attn.q_proj.weight"
WRONG = {
    "unknown name": (lambda w: w | {"model.layers.9.mlp.up_proj.weight": w[Q0]}, "1 unknown"),
    "missing name": (lambda w: {n: t for n, t in w.items() if n != Q0}, "1 missing .missing: " + Q0),
    "wrong shape in the last": (lambda w: w | {list(w)[-1]: w[list(w)[-1]][:-1]}, "1 mis-shaped"),
    "transposed": (lambda w: w | {HEAD: w[HEAD].t()}, r"lm_head.weight \[32, 96\] instead of \[96, 32\]"),
    "given twice": (lambda w: [*w.items(), (Q0, w[Q0])], "1 given twice"),
    "twice by prefix": (lambda w: w | {"module." + Q0: w[Q0]}, "1 given twice"),
    "empty": (lambda w: {}, "missing"),
    "empty tensor": (lambda w: w | {Q0: w[Q0][:0]}, "1 mis-shaped"),
    "other size": (lambda w: {n: torch.cat([t, t]) for n, t in w.items()}, "mis-shaped"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("atomic", [True, False])
def test_a_wrong_whole_set_is_refused_before_any_write(rig, wrong, atomic):
    """E2: counts and names in the error; not one bit of weights or version has changed."""
    make, message = WRONG[wrong]
    state = rig.state()
    with pytest.raises(WeightUpdateError, match=message):
        rig.update(make(rig.w1), atomic=atomic, label="v1")
    assert rig.holds(rig.w0) and rig.state() == state
    rig.update(rig.w1)
    assert rig.holds(rig.w1)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_stream_leaves_invalid_weights_and_says_so(rig, wrong):
    """E2, E14: a stream is judged as it comes; what it broke is invalid until a complete update."""
    make, message = WRONG[wrong]
    with pytest.raises(WeightUpdateError, match=message):
        named = make(rig.w1)
        rig.update(iter(named.items() if isinstance(named, dict) else named), whole=False)
    touched = not rig.holds(rig.w0)
    assert rig.store.version.valid is not touched and touched is (wrong not in ("empty", "other size"))
    if touched:
        with pytest.raises(EngineStateError, match="failed half-way: the source broke"):
            rig.store.version.require_valid()
    rig.update(rig.w1)
    assert rig.holds(rig.w1) and rig.store.version.valid


def test_promised_sets_are_judged_without_their_tensors(rig):
    """E2: a group's names and shapes are judged before the first tensor comes."""
    shapes = [(name, tensor.shape) for name, tensor in rig.w1.items()]
    update = WeightUpdate(rig.store, kind="distributed")
    assert [target.parts[0].hf_name for target in update.check_promised(shapes)] == list(rig.w1)
    for bad in (shapes[1:], [*shapes, ("x", (1,))], [*shapes[1:], (shapes[0][0], (1, 1))]):
        with pytest.raises(WeightUpdateError):
            update.check_promised(bad)
    assert not update.wrote
    update.run(rig.w1.items())
    assert update.commit().kind == "distributed" and rig.holds(rig.w1)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "base_model.model.", "module._orig_mod."])
@pytest.mark.parametrize("whole", [True, False])
def test_fused_and_prefixed_names_mix_freely(rig, prefix, whole):
    """E3: fused, unfused and slot names with wrappers' prefixes: equal weights, none skipped."""
    named = dict(rig.w1)
    at = "model.layers.0.self_attn."
    for kind in ("weight", "bias"):
        named[f"{at}qkv_proj.{kind}"] = torch.cat([named.pop(f"{at}{p}_proj.{kind}") for p in "qkv"])
    at = "model.layers.1.mlp."
    named["layers.1.gate_up.weight"] = torch.cat([named.pop(f"{at}{p}_proj.weight") for p in ("gate", "up")])
    named["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.arange(4)
    receipt = rig.update({prefix + name: tensor for name, tensor in named.items()}.items(), whole=whole)
    assert rig.holds(rig.w1) and receipt.bytes == rig.store.nbytes


@pytest.mark.parametrize("whole", [True, False])
def test_a_part_given_fused_and_alone_is_refused(rig, whole):
    """E3: each weight exactly once: never one over the other by order."""
    at = "model.layers.0.self_attn."
    fused = torch.cat([rig.w1[f"{at}{p}_proj.weight"] for p in "qkv"])
    with pytest.raises(WeightUpdateError, match="given twice"):
        rig.update([(f"{at}qkv_proj.weight", fused), *rig.w1.items()], whole=whole)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("names", [(EMBED,), (HEAD,), (EMBED, HEAD), (HEAD, EMBED)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_weights_come_by_either_name_or_both(tiny, names, whole, dtype):
    """E4: one weight, once in the receipt; both names may come when they agree after the cast."""
    rig = Rig(tiny, dtype=dtype, tie_word_embeddings=True)
    named = {name: tensor.double() for name, tensor in rig.w1.items() if name != EMBED}
    for at, name in enumerate(names):  # a difference that the cast to the engine's dtype removes
        named[name] = rig.w1[EMBED].double() * (1 + at * 1e-12)
    receipt = rig.update(named.items(), whole=whole)
    assert rig.holds(rig.w1)
    assert receipt.loaded == tuple(rig.store.names.hf_names) and receipt.bytes == rig.store.nbytes


@pytest.mark.parametrize("order", [(EMBED, HEAD), (HEAD, EMBED)])
def test_tied_weights_that_differ_are_refused(tiny, order):
    """E4: a whole set before any write; a stream when the second comes."""
    rig = Rig(tiny, tie_word_embeddings=True)
    state, named = rig.state(), {name: rig.w1[EMBED] for name in order} | rig.w1
    named[HEAD] = named[HEAD] + 1e-3
    with pytest.raises(WeightUpdateError, match="tie_word_embeddings"):
        rig.update(named)
    assert rig.holds(rig.w0) and rig.state() == state
    with pytest.raises(WeightUpdateError, match="tie_word_embeddings"):
        rig.update(iter(named.items()), whole=False)
    assert not rig.store.version.valid


def test_an_untied_head_is_a_weight_of_its_own(rig):
    """E4: embedding and head of an untied model differ, and each is needed."""
    assert not torch.equal(rig.w1[EMBED], rig.w1[HEAD])
    rig.update(rig.w1)
    assert rig.holds(rig.w1)
    for name in (EMBED, HEAD):
        with pytest.raises(WeightUpdateError, match="1 missing .missing: " + name):
            rig.update({n: t for n, t in rig.w1.items() if n != name})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["whole", "stream", "bucket"])
def test_any_floats_with_any_strides_are_cast_once(tiny, dtype, form):
    """E5: fp16, bf16, fp32 and fp64 mixed, transposed and strided: the bits of one cast."""
    rig = Rig(tiny, dtype=dtype)
    kinds = itertools.cycle([torch.float64, torch.float32, torch.float16, torch.bfloat16])
    named = {}
    for name, tensor in rig.models[1].named_parameters():
        cast = (tensor.detach().double() * 1.0009765).to(next(kinds))
        named[name] = cast.t().contiguous().t() if cast.dim() == 2 else torch.stack([cast, cast], -1)[..., 0]
    expected = {name: tensor.to(dtype) for name, tensor in named.items()}
    rig.update(flatten(named).tensors() if form == "bucket" else named.items(), whole=form != "stream")
    assert rig.holds(expected)


def test_the_same_weights_twice_and_back_again(rig):
    """E6: idempotent, there and back, in place; E17: each a new epoch, under one label too."""
    epochs, digests = [], []
    for weights in (rig.w1, rig.w1, rig.w0, rig.w1):
        digests.append(rig.update(weights, label="same").checksum)
        assert rig.holds(weights) and rig.store.version.label == "same"
        epochs.append(rig.store.version.epoch)
    assert len(set(epochs)) == 4 and epochs == sorted(epochs)
    assert digests[0] == digests[1] == digests[3] != digests[2]


def test_unlabelled_updates_are_numbered(rig):
    """Contract 6: None labels with the number of commits so far."""
    commits = rig.store.version.commits
    assert [rig.update(rig.w1).version for _ in range(2)] == [str(commits + 1), str(commits + 2)]


@pytest.mark.parametrize("atomic", [True, False])
def test_no_incoming_tensor_outlives_a_hundred_updates(rig, atomic):
    """E10: each tensor is dead as soon as the caller drops it; requiring grad leaves no graph behind."""
    alive: list[weakref.ref] = []
    gc.collect()
    gc.disable()
    try:
        for number in range(100):
            named = {name: t.clone().requires_grad_(number % 2 == 0) for name, t in rig.w1.items()}
            refs = [weakref.ref(tensor) for tensor in named.values()]
            rig.update(named, atomic=atomic)
            del named
            assert all(ref() is None for ref in refs)

            def stream():
                for name, tensor in rig.w0.items():
                    assert all(ref() is None for ref in alive)
                    fresh = tensor.clone()
                    alive[:] = [weakref.ref(fresh)]
                    yield name, fresh
                    del fresh

            rig.update(stream(), whole=False, atomic=atomic)
        assert not any(tensors[0].requires_grad for tensors in rig.store.weights.values())
    finally:
        gc.enable()


@pytest.mark.parametrize("wrong", ["unknown name", "wrong shape in the last", "missing name"])
def test_an_error_holds_no_tensor_of_a_refused_set(rig, wrong):
    """E10: neither the error nor its traceback keeps a refused set's tensors; held by the caller for long."""
    named = list({n: t.clone() for n, t in WRONG[wrong][0](rig.w1).items()}.items())
    refs = [weakref.ref(tensor) for _, tensor in named]
    update = WeightUpdate(rig.store, kind="tensor")
    errors = []
    try:
        update.check_whole(named)
    except WeightUpdateError as error:
        errors.append(error)
    try:
        update.claim("nobody", named[0][1])
    except WeightUpdateError as error:
        errors.append(error)
    del named
    assert len(errors) == 2 and all(ref() is None for ref in refs)


@pytest.mark.parametrize("atomic", [True, False])
def test_an_update_ends_once(rig, atomic):
    """What happens after a commit, or after a failure, neither undoes nor repeats it."""
    update = WeightUpdate(rig.store, kind="tensor", atomic=atomic)
    update.run(rig.w1.items())
    update.commit()
    state = rig.state()
    update.fail("too late")
    assert rig.state() == state and rig.holds(rig.w1)
    update = WeightUpdate(rig.store, kind="tensor", atomic=atomic)
    update.run(list(rig.w0.items())[:4])
    update.fail("first")
    rig.update(rig.w1)
    state = rig.state()
    update.fail("again")
    assert rig.state() == state and rig.holds(rig.w1)


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("fails_at", range(4))
def test_a_device_that_fails_is_no_commit(rig, monkeypatch, atomic, fails_at):
    """E9: at whichever wait the device fails, an update that raises is not in force: old weights, or invalid
    ones; and one that doesn't raise is."""
    settle, waits = rig.store.settle, itertools.count()

    def break_once():
        if next(waits) == fails_at:
            raise RuntimeError("the device is gone")
        settle()

    before = rig.state()
    monkeypatch.setattr(rig.store, "settle", break_once)
    try:
        receipt = rig.update(rig.w1, label="w1", atomic=atomic)
    except RuntimeError:
        untouched = rig.holds(rig.w0)
        assert rig.state()[:3] == before[:3]
        assert rig.store.version.valid is untouched
    else:
        assert receipt.version == rig.store.version.label == "w1" and rig.holds(rig.w1)
        assert receipt.checksum == checksum(rig.w1)
    monkeypatch.setattr(rig.store, "settle", settle)
    assert rig.update(rig.w1).checksum == checksum(rig.w1)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_is_flat_over_a_hundred_updates(tiny):
    """E10: whole sets, streams, failures and journals: nothing accumulates (each set is 4.5 MB)."""
    rig = Rig(tiny, hidden_size=256, intermediate_size=1024, num_hidden_layers=1)

    def once(number: int) -> None:
        fresh = {name: tensor.clone() for name, tensor in rig.w1.items()}
        rig.update(flatten(fresh).tensors() if number % 3 == 0 else fresh, atomic=number % 2 == 0)
        with pytest.raises(Broken):
            rig.update(breaking(fresh, 5), whole=False, atomic=number % 2 == 0)

    for number in range(20):
        once(number)
    start = resident()
    for number in range(100):
        once(number)
    assert resident() - start < 30e6


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_the_callers_grad_mode_does_not_matter(rig, mode):
    """In-process manners: updates from within inference mode, committed or taken back outside of it."""
    for broken in (True, False):
        update = WeightUpdate(rig.store, kind="tensor", atomic=True)
        with mode():
            update.run((name, (tensor + 0).requires_grad_()) for name, tensor in rig.w1.items())
        if broken:
            update.fail("on another thread")
            assert rig.holds(rig.w0)
        else:
            update.commit()
            assert rig.holds(rig.w1)
    for (tensor,) in rig.store.weights.values():
        assert not (tensor.requires_grad or tensor.is_inference())


class Broken(Exception):
    """What a caller's iterator raises."""


def breaking(named, after):
    for at, pair in enumerate(named.items()):
        if at == after:
            raise Broken
        yield pair


@pytest.mark.parametrize("after", [0, 1, 5, 20])
def test_a_broken_stream_makes_the_weights_invalid(rig, after):
    """E14: plain: invalid from the first write until a complete update; before it nothing happened."""
    state = rig.state()
    with pytest.raises(Broken):
        rig.update(breaking(rig.w1, after), whole=False)
    assert rig.store.version.valid is (after == 0) and rig.holds(rig.w0) is (after == 0)
    assert (rig.state() == state) is (after == 0)
    epoch = rig.store.version.epoch
    rig.update(rig.w1)
    assert rig.store.version.valid and rig.holds(rig.w1) and rig.store.version.epoch > epoch


@pytest.mark.parametrize("after", [0, 1, 5, 20])
@pytest.mark.parametrize("valid", [True, False])
def test_a_broken_atomic_stream_leaves_no_trace(rig, after, valid):
    """E14: atomic: old weights, epoch, label, validity and reason, bit for bit, NaN payloads included."""
    poison = rig.store.weights["layers.0.qkv.weight"][0].view(torch.int32)
    poison[0, 0] = 0x7FC12345
    before = rig.tiny.held(rig.store)
    if not valid:
        rig.store.version.invalidate("nobody knows")
    state = rig.state()
    with pytest.raises(Broken):
        rig.update(breaking(rig.w1, after), whole=False, atomic=True, label="v1")
    assert rig.holds(before) and rig.state() == state
    rig.update(iter(rig.w1.items()), whole=False, atomic=True)
    assert rig.holds(rig.w1) and rig.store.version.valid


def test_a_checksum_is_never_of_half_an_update(rig):
    """Contract 6: asked for while bytes change it is refused; after an atomic failure it is there again."""
    receipt = rig.update(rig.w1, label="v1")
    expected = checksum(rig.w1)
    seen = []

    def stream():
        yield from list(rig.w0.items())[:3]
        with pytest.raises(EngineStateError, match="no checksum"):
            _ = receipt.checksum
        seen.append(True)
        raise Broken

    with pytest.raises(Broken):
        rig.update(stream(), whole=False, atomic=True)
    assert seen and receipt.checksum == expected


def test_an_update_of_the_first_weights_keeps_the_stores_label(tiny):
    """A store's first complete set is called as it was constructed to be."""
    store = tiny.store(tiny.config())
    store.allocate()
    update = WeightUpdate(store, kind="loaded")
    update.run(tiny.model().named_parameters())
    receipt = update.commit()
    assert (receipt.version, store.version.commits, store.version.epoch) == ("default", 0, 1)
