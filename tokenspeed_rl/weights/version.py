"""Identity and validity of the weights: an epoch, a label for people, a reason when invalid."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tokenspeed_rl.errors import WeightsInvalidError


class WeightVersion:
    """Which weights the engine holds, and whether they are a complete set. Plain state, no tensors, one owner
    thread.

    `epoch` is the identity: new for every committed change, never used twice. `label` is what people see; two
    commits may carry the same label. Weights start invalid; `start` makes the first set valid under the first
    label.

    A version may arrive in pieces. Which weights hold it so far is collected until it is complete; whatever
    else changes the weights, or makes them invalid, ends the collection.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.epoch = 0
        self.commits = 0
        self.reason: str | None = "no weights were loaded yet"
        self._arriving: str | None = None  # label of the version that has arrived in part
        self._arrived: dict[str, str] = {}  # weight -> the name under which it was given

    @property
    def valid(self) -> bool:
        return self.reason is None

    def start(self) -> None:
        """The first complete set is in place; it keeps the label given at construction and is no commit."""
        self.epoch += 1
        self._settle(None)

    def commit(self, label: str | None = None) -> None:
        """A complete change is in place. Without a label it is called by the number of commits so far."""
        self.epoch += 1
        self.commits += 1
        self.label = str(self.commits) if label is None else label
        self._settle(None)

    def rename(self, label: str) -> None:
        """People see another label; the weights, and so the epoch, are the same."""
        self.label = label

    def invalidate(self, reason: str) -> None:
        """The slots hold no complete set any more; `reason` completes "the weights are invalid: ..."."""
        self._settle(reason)

    def arrived(self, label: str) -> Mapping[str, str]:
        """The weights that hold version `label`, which is arriving in pieces: weight -> name it came by."""
        return self._arrived if label == self._arriving else {}

    def add_piece(self, label: str, written: Mapping[str, str], every: Collection[str]) -> None:
        """A piece of version `label` is in place: commits it once `every` weight holds it, else invalid.

        A piece of another version than the last one starts over.
        """
        self._arrived = {**self.arrived(label), **written}
        self._arriving = label
        if len(self._arrived) == len(every):
            self.commit(label)
        else:
            self._count_arrived(len(every))

    def overwrite(self, written: Collection[str], total: int) -> None:
        """Some of the `total` weights were changed by themselves; valid weights are a new version.

        Invalid ones stay so, and the version that is arriving lacks the weights written.
        """
        if self.valid:
            self.commit()
        elif self._arriving is not None:
            self._arrived = {name: by for name, by in self._arrived.items() if name not in written}
            self._count_arrived(total)

    def _count_arrived(self, total: int) -> None:
        found = len(self._arrived)
        self.reason = f"version {self._arriving!r} has arrived in part: {found} of {total} weights"

    def _settle(self, reason: str | None) -> None:
        self.reason, self._arriving, self._arrived = reason, None, {}

    def require_valid(self) -> None:
        """Raise `WeightsInvalidError` with the reason unless the weights are a complete set."""
        if self.reason is not None:
            raise WeightsInvalidError(
                f"the weights are invalid: {self.reason}",
                fix="Write a complete set; of a shared module call weights_changed() or share_weights().",
            )
