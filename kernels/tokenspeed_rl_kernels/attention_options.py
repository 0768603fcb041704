"""What an attention may be asked for beside its tensors: one object for references, plans and launchers."""

from dataclasses import dataclass

from torch import Tensor

Shared = tuple[Tensor, Tensor, Tensor]
"""(prefix_pages [G, m], prefix_lens [G], group_of_row [B]), int32: see `paged_decode`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """How scores become probabilities; see `paged_decode`."""

    scale: float | None = None
    """Factor on the scores; None: D ** -0.5."""
    window: int | None = None
    """A query sees its own and the ``window - 1`` tokens before it; None: all before it."""
    softcap: float | None = None
    """s -> softcap * tanh(s / softcap)."""
    sinks: Tensor | None = None
    """[Hq]: one more logit per head, which takes probability and gives no value."""

    def scale_for(self, dim: int) -> float:
        """The factor, for heads of this size."""
        return dim**-0.5 if self.scale is None else self.scale
