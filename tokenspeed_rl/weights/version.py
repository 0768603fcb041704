"""Identity and validity of the weights: an epoch, a label for people, a reason when invalid."""

from __future__ import annotations

from tokenspeed_rl.errors import WeightsInvalidError


class WeightVersion:
    """Which weights the engine holds, and whether they are a complete set. Plain state, no tensors, one owner
    thread.

    `epoch` is the identity: new for every committed change, never used twice. `label` is what people see; two
    commits may carry the same label. Weights start invalid; `start` makes the first set valid under the first
    label.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.epoch = 0
        self.commits = 0
        self.reason: str | None = "no weights were loaded yet"

    @property
    def valid(self) -> bool:
        return self.reason is None

    def start(self) -> None:
        """The first complete set is in place; it keeps the label given at construction and is no commit."""
        self.epoch += 1
        self.reason = None

    def commit(self, label: str | None = None) -> None:
        """A complete change is in place. Without a label it is called by the number of commits so far."""
        self.epoch += 1
        self.commits += 1
        self.label = str(self.commits) if label is None else label
        self.reason = None

    def invalidate(self, reason: str) -> None:
        """The slots hold no complete set any more; `reason` completes "the weights are invalid: ..."."""
        self.reason = reason

    def relabel(self, label: str) -> None:
        """Change the label alone: same weights, same epoch."""
        self.label = label

    def require_valid(self) -> None:
        """Raise `WeightsInvalidError` with the reason unless the weights are a complete set."""
        if self.reason is not None:
            raise WeightsInvalidError(
                f"the weights are invalid: {self.reason}",
                fix="Write a complete set of weights, or call share_weights(module), then generate.",
            )
