"""An engine that holds known weights, and what must still be true of it after an update that failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor

from tests.lifecycle.guarded import PROMPT, exact, looks, version, weights_of
from tests.lifecycle.rollouts import EXACT, ask, span_gap, take
from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.errors import WeightsInvalidError

W0, W1 = Tiny.model(), Tiny.model(seed=1)
HEAD, NORM = "lm_head.weight", "model.norm.weight"


class Kept:
    """An engine that holds W0, and what it looked like then."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.reset()

    def reset(self) -> None:
        """W0 again."""
        self.engine.update_weights_from_tensor(weights_of(W0), weight_version="W0")
        self.looks, self.version = looks(self.engine), version(self.engine)

    def check(self) -> None:
        """Nothing has changed: bits, version, names, and a warm prompt is warm."""
        assert version(self.engine) == self.version
        assert exact(W0, self.engine) < EXACT and exact(W0, self.engine, cached=20) < EXACT
        assert looks(self.engine) == self.looks
        Tiny.all_back(self.engine)

    def mend(self) -> None:
        """Weights that are invalid serve nobody, until a complete update."""
        assert self.engine.get_internal_state()[0]["validity"].startswith("invalid")
        for call in (lambda: self.engine.generate(input_ids=[1]), self.engine.weights_checksum):
            with pytest.raises(WeightsInvalidError, match="failed half-way"):
                call()
        with pytest.raises(WeightsInvalidError, match="failed half-way"):
            self.engine.get_weights_by_name(HEAD)
        waiting = ask(self.engine, PROMPT)
        self.engine.update_weights_from_tensor(weights_of(W1), weight_version="W1")
        assert span_gap({"W1": W1}, PROMPT, take(self.engine, waiting)) < EXACT
        assert exact(W1, self.engine, cached=20) < EXACT
        self.reset()


def breaks(after: int, act: Callable[[], Any]) -> Iterator[tuple[str, Tensor]]:
    """`after` tensors of W1, then whatever `act` does, then the others."""
    for number, (name, tensor) in enumerate(weights_of(W1).items()):
        if number == after:
            act()
        yield name, tensor
