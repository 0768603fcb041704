"""Whether a seed draws the same, whatever else happened to a request on its way."""

from __future__ import annotations

import threading
from typing import Any

from tests.soak.check import Asked

RARE = 1e-4
"""Share of tokens at which two draws may part: where the two likeliest are equal but for rounding."""


class Draws:
    """What each (prompt, weights, temperature, seed, index of the sample) has drawn so far."""

    def __init__(self) -> None:
        self.compared = 0
        self.parted: list[str] = []
        self._drawn: dict[tuple[Any, ...], list[int]] = {}
        self._lock = threading.Lock()

    def compare(self, asked: Asked, result: dict[str, Any], *, frozen: bool) -> None:
        """Take in a sample; counts where only its seed, and one complete set of weights, decide it."""
        spans, ids = result["meta_info"]["weight_versions"], result["output_ids"]
        numbers = {span["version"].rpartition("/")[2] for span in spans}
        if frozen or asked.seed is None or len(numbers) > 1 or "/" not in spans[0]["version"]:
            return
        index = result["meta_info"]["index"]
        key = (tuple(asked.prompt), *numbers, asked.temperature, asked.seed, index)
        with self._lock:
            before = self._drawn.get(key, [])
            common = min(len(ids), len(before))
            self.compared += common
            if ids[:common] != before[:common]:
                at = next(i for i in range(common) if ids[i] != before[i])
                self.parted.append(
                    f"{asked.rid}, sample {index}, seed {asked.seed}, token {at} of {ids}: {before}"
                )
            elif len(ids) > len(before):
                self._drawn[key] = ids

    def check(self) -> None:
        """Raises AssertionError if more draws parted than rounding explains."""
        assert len(self.parted) <= 1 + RARE * self.compared, "\n".join(
            ["other draws of one seed:", *self.parted]
        )
