"""Partial updates: a change of some weights, or a piece of a version that counts when all of it is there."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_rl.errors import WeightsInvalidError, WeightUpdateError
from tokenspeed_rl.weights import WeightUpdate, randomise
from tokenspeed_rl.weights.version import WeightVersion

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Rig:
    """A store with weights W0, and others to be written."""

    def __init__(self, tiny, **changes):
        self.tiny = tiny
        models = [tiny.model("Qwen3", seed, **changes) for seed in range(3)]
        self.w0, self.w1, self.w2 = (dict(model.named_parameters()) for model in models)
        self.store = tiny.store(tiny.config("Qwen3", **changes))
        randomise(self.store, seed=0, std=0.02)
        self.put(self.w0, partial=False)
        self.names = list(self.w0)

    def put(self, named, label=None, *, partial=True, atomic=False, broken=False):
        update = WeightUpdate(self.store, kind="tensor", label=label, partial=partial, atomic=atomic)
        try:
            update.run(named.items())
            if broken:
                raise RuntimeError
            return update.commit()
        except BaseException as error:
            update.fail(type(error).__name__)
            raise

    def some(self, weights, *at):
        return {name: weights[name] for name in self.names[slice(*at)]}

    def holds(self, *sets):
        merged = {}
        for weights in sets:
            merged |= weights
        return self.tiny.same_bits(self.tiny.held(self.store), {n: t.detach() for n, t in merged.items()})

    @property
    def version(self) -> WeightVersion:
        return self.store.version


@pytest.fixture
def rig(tiny):
    return Rig(tiny)


def test_a_subset_without_a_label_is_a_change_of_its_own(rig):
    """Contract 6: from valid weights it commits; the receipt says what was left as it was."""
    epoch, commits = rig.version.epoch, rig.version.commits
    subset = rig.some(rig.w1, 3, 8)
    receipt = rig.put(subset)
    assert rig.version.valid and rig.version.epoch > epoch and receipt.version == str(commits + 1)
    assert set(receipt.loaded) == set(subset) and set(receipt.missing) == set(rig.names) - set(subset)
    assert rig.holds(rig.w0, subset)
    assert receipt.checksum == rig.store.checksum()


def test_a_subset_does_not_mend_invalid_weights(rig):
    """Contract 6: written, but the weights stay invalid, and the receipt says so."""
    rig.version.invalidate("nobody knows")
    epoch = rig.version.epoch
    receipt = rig.put(rig.some(rig.w1, 5))
    assert (receipt.version, rig.version.reason, rig.version.epoch) == ("invalid", "nobody knows", epoch)
    assert rig.holds(rig.w0, rig.some(rig.w1, 5))


def test_pieces_of_one_version_become_a_complete_update(rig):
    """E16: invalid from the first piece until together they cover every weight; then one new version."""
    epoch, total = rig.version.epoch, len(rig.names)
    first = rig.put(rig.some(rig.w1, 0, 10), "v1")
    assert first.version == "invalid" and set(first.missing) == set(rig.names[10:])
    with pytest.raises(WeightsInvalidError, match=f"'v1' has arrived in part: 10 of {total} weights"):
        rig.version.require_valid()
    assert rig.version.epoch == epoch
    last = rig.put(rig.some(rig.w1, 10, None), "v1")
    assert rig.version.valid and rig.version.label == last.version == "v1" and rig.version.epoch == epoch + 1
    assert last.missing == () and set(last.loaded) == set(rig.names[10:])
    assert rig.holds(rig.w1)


@settings(max_examples=30)
@given(cuts=st.lists(st.integers(0, 24), max_size=5), seed=st.randoms(use_true_random=False))
def test_pieces_may_be_cut_anywhere(tiny, cuts, seed):
    """E16: in any order and any size, empty ones too: valid exactly when every weight was given."""
    rig = Rig(tiny)
    rig.version.invalidate("nothing yet")
    order = list(rig.names)
    seed.shuffle(order)
    edges = [0, *sorted(cuts), len(order)]
    given_so_far: set[str] = set()
    for start, stop in pairwise(edges):
        given_so_far.update(order[start:stop])
        receipt = rig.put({name: rig.w1[name] for name in order[start:stop]}, "v")
        assert rig.version.valid is (len(given_so_far) == len(order))
        if stop > start:
            assert set(receipt.missing) == set(order) - given_so_far
    assert rig.holds(rig.w1) and rig.version.label == "v"


def test_pieces_of_two_versions_are_no_version(rig):
    """E16: a piece of another version starts over: halves of two stay invalid."""
    rig.put(rig.some(rig.w1, 0, 10), "v1")
    rig.put(rig.some(rig.w2, 10, None), "v2")
    with pytest.raises(WeightsInvalidError, match="'v2' has arrived in part"):
        rig.version.require_valid()
    rig.put(rig.some(rig.w1, 10, None), "v1")
    assert not rig.version.valid
    rig.put(rig.some(rig.w1, 0, 10), "v1")
    assert rig.version.valid and rig.holds(rig.w1)


def test_a_weight_given_again_overwrites(rig):
    """Contract 6: a later piece's value counts; within one piece twice is refused."""
    rig.put(rig.some(rig.w2, 0, 12), "v1")
    rig.put(rig.some(rig.w1, 6, None), "v1")
    assert rig.version.valid and rig.holds(rig.some(rig.w2, 0, 6), rig.some(rig.w1, 6, None))


def test_a_complete_update_in_between_ends_the_collection(rig):
    """E16: what came before a complete update is overwritten, and counts for nothing."""
    rig.put(rig.some(rig.w1, 0, 10), "v1")
    rig.put(rig.w2, "v2", partial=False)
    assert rig.version.valid and rig.version.label == "v2"
    rig.put(rig.some(rig.w1, 10, None), "v1")
    assert not rig.version.valid
    assert set(rig.put(rig.some(rig.w1, 0, 9), "v1").missing) == {rig.names[9]}


def test_a_subset_in_between_takes_its_weights_out_of_the_version(rig):
    """E16: a weight overwritten without the label holds the version no more, so it must come again."""
    rig.put(rig.some(rig.w1, 0, 10), "v1")
    rig.put(rig.some(rig.w2, 8, 10))
    with pytest.raises(WeightsInvalidError, match="in part: 8 of"):
        rig.version.require_valid()
    assert rig.put(rig.some(rig.w1, 10, None), "v1").missing == tuple(
        name for name in rig.store.names.hf_names if name in rig.names[8:10]
    )
    rig.put(rig.some(rig.w1, 8, 10), "v1")
    assert rig.version.valid and rig.holds(rig.w1)


def test_losing_the_weights_ends_the_collection(rig):
    """Contract 5: weights released without backup are gone, and so are the pieces."""
    rig.put(rig.some(rig.w1, 0, 10), "v1")
    rig.version.invalidate("the weights were released")
    rig.put(rig.some(rig.w1, 10, None), "v1")
    assert not rig.version.valid


def test_a_failed_piece_ends_the_collection(rig):
    """E14, E16: plain: half a piece was written, so nothing of the version is trusted."""
    rig.put(rig.some(rig.w1, 0, 10), "v1")
    with pytest.raises(RuntimeError):
        rig.put(rig.some(rig.w2, 5, 12), "v1", broken=True)
    with pytest.raises(WeightsInvalidError, match="failed half-way: RuntimeError"):
        rig.version.require_valid()
    rig.put(rig.some(rig.w1, 10, None), "v1")
    assert not rig.version.valid


@pytest.mark.parametrize("label", ["v1", "v2", None])
def test_a_failed_atomic_piece_changes_nothing(rig, label):
    """E14, E16: bytes, validity, reason and collection as they were: the version can still be completed."""
    rig.put(rig.some(rig.w1, 0, 10), "v1")
    reason = rig.version.reason
    with pytest.raises(RuntimeError):
        rig.put(rig.some(rig.w2, 5, 12), label, atomic=True, broken=True)
    assert rig.version.reason == reason and rig.holds(rig.w0, rig.some(rig.w1, 0, 10))
    rig.put(rig.some(rig.w1, 10, None), "v1", atomic=True)
    assert rig.version.valid and rig.holds(rig.w1)


def test_a_piece_that_fails_before_its_first_write_changes_nothing(rig):
    """E2, E16: an unknown name first: the collection stands."""
    rig.put(rig.some(rig.w1, 0, 10), "v1")
    with pytest.raises(WeightUpdateError, match="1 unknown"):
        rig.put({"nobody": torch.zeros(1)}, "v1")
    rig.put(rig.some(rig.w1, 10, None), "v1")
    assert rig.version.valid


@pytest.mark.parametrize("order", [(EMBED, HEAD), (HEAD, EMBED)])
@pytest.mark.parametrize("whole", [True, False])
def test_a_tie_holds_across_pieces(tiny, order, whole):
    """E4, E16: embedding and head of a tied model in two pieces must agree, as they must within one."""
    rig = Rig(tiny, tie_word_embeddings=True)
    rest = {name: tensor for name, tensor in rig.w1.items() if name != EMBED}
    first, second = order
    rig.put({first: rig.w1[EMBED]}, "v1")

    def put(value):
        update = WeightUpdate(rig.store, kind="tensor", label="v1", partial=True, atomic=True)
        named = list((rest | {second: value}).items())
        try:
            if whole:
                update.check_whole(named)
            update.run(named)
            return update.commit()
        except BaseException:
            update.fail("")
            raise

    with pytest.raises(WeightUpdateError, match="tie_word_embeddings"):
        put(rig.w2[EMBED])
    assert put(rig.w1[EMBED]).version == "v1"
    assert rig.version.valid and rig.holds(rig.w1)


def test_an_empty_piece_changes_nothing(rig):
    """Nothing written, nothing changed: an empty bucket in a transfer is no beginning of a version."""
    epoch = rig.version.epoch
    rig.put({}, "v1")
    assert rig.version.valid and rig.version.epoch == epoch
