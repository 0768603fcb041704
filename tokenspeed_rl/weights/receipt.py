"""What a weight update did."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tokenspeed_rl.errors import EngineStateError


@dataclass(slots=True, kw_only=True)
class Receipt:
    """Report of one change of the weights."""

    loaded: tuple[str, ...]
    """Hugging Face names of the weights that were written or, when shared, seen; ties once."""
    missing: tuple[str, ...] = ()
    """What a partial update left as it was; of a piece of a version: what the version still lacks."""
    unknown: tuple[str, ...] = ()
    """Names that belong to no weight; empty, as such an update is refused."""
    bytes: int
    """Bytes copied into the engine: 0 for shared weights."""
    seconds: float
    version: str
    """Label of the weights after the change; ``"invalid"`` while they are no complete set."""
    kind: str
    """``loaded`` (at the start), ``random``, ``shared``, ``tensor``, ``distributed``, ``disk``."""
    compute_checksum: Callable[[], str | None] = field(repr=False)
    """Digest of the weights, None when they have changed since."""
    _checksum: str | None = field(default=None, repr=False)

    @property
    def report(self) -> Receipt:
        """Itself, so that every update's answer has a `.report`."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy knows the checksum if it was asked for before; it can't compute it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return partial(Receipt, **{**fields, "compute_checksum": _gone}), ()

    @property
    def checksum(self) -> str:
        """`tokenspeed_rl.weights.checksum` of the engine's weights, computed on first access and kept.

        Of shared weights it is the digest of what the trainer has there at that moment.

        Raises:
            EngineStateError: the weights are invalid, or have changed since, so their digest can't be had.
        """
        if self._checksum is None:
            self._checksum = self.compute_checksum()
        if self._checksum is None:
            raise EngineStateError(
                f"the weights of version {self.version!r} are incomplete or gone, and have no checksum",
                fix="Read receipt.checksum of a complete update, before the next change of the weights.",
            )
        return self._checksum


def _gone() -> None:
    """The checksum of a receipt's copy."""
