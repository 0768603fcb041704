"""The verdicts of the section `correct`."""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

ALLOWED = 1.5
"""Our error over that of plain torch in the same dtype, both to float64."""


@dataclass(slots=True)
class Checks:
    """What was compared, a line each."""

    promised: bool
    """Whether equality of bits is promised here: by Triton it is, by the CPU's paths not everywhere."""
    lines: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def trial(self, name: str) -> Iterator[None]:
        """Within, what raises is one check that failed, and the next goes on."""
        try:
            yield
        except Exception:
            self.lines.append({"check": name, "raised": traceback.format_exc(), "ok": False})

    def exact(
        self, name: str, ours: Tensor, torchs: Tensor, true: Tensor, largest: float | None = None
    ) -> None:
        """Our largest error to the float64 result, against torch's and half a rounding step of the `largest`
        number on the way (None: of the results)."""
        true = true.double().cpu()
        step = torch.finfo(ours.dtype).eps / 2 * (largest or float(true.abs().max()))
        mine, its = (float((x.double().cpu() - true).abs().max()) for x in (ours, torchs))
        fine = mine <= ALLOWED * its + step
        self.lines.append({"check": name, "error": mine, "of_torch": its, "ok": fine})

    def equal(self, name: str, one: Tensor, other: Tensor, *, promised: bool | None = None) -> None:
        """The same bits; `promised` None: where Triton runs."""
        same = torch.equal(one, other)
        promised = self.promised if promised is None else promised
        largest = 0.0 if same else float((one.double() - other.double()).abs().max())
        line = {"check": name, "equal": same, "difference": largest, "ok": same or not promised}
        self.lines.append(line if promised else {**line, "promised": False})

    @property
    def failed(self) -> Sequence[str]:
        """Names of those that did."""
        return [line["check"] for line in self.lines if not line["ok"]]
