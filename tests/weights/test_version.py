"""Epoch, label and validity of the weights, as plain state."""

from __future__ import annotations

import pytest

from tokenspeed_rl.errors import EngineStateError, WeightsInvalidError
from tokenspeed_rl.weights.version import WeightVersion


def test_labels_count_commits_unless_given():
    """The first set keeps the configured label; commits without one are called by their number."""
    version = WeightVersion("default")
    version.start()
    labels = [version.label]
    for label in (None, "mine", None):
        version.commit(label)
        labels.append(version.label)
    assert labels == ["default", "1", "mine", "3"]


def test_every_commit_is_a_new_epoch():
    """Two commits under one label differ in identity."""
    version = WeightVersion("default")
    version.start()
    epochs = [version.epoch]
    version.commit("same")
    epochs.append(version.epoch)
    version.commit("same")
    epochs.append(version.epoch)
    assert len(set(epochs)) == 3


def test_invalid_until_the_next_commit_with_the_reason_in_the_error():
    """Nothing may be computed with weights that are no complete set, and the error says why."""
    version = WeightVersion("default")
    with pytest.raises(WeightsInvalidError, match="no weights were loaded"):
        version.require_valid()
    version.start()
    version.require_valid()
    epoch = version.epoch
    version.invalidate("the update stopped half-way")
    assert not version.valid
    with pytest.raises(EngineStateError, match="stopped half-way"):
        version.require_valid()
    version.commit()
    assert version.valid and version.epoch > epoch
