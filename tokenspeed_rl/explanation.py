"""What was found out about the difference of a rollout and its trainer: the facts, and what they come to."""

from __future__ import annotations

from dataclasses import dataclass, field

Triple = tuple[float, int, str | None]
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """`print` it. Three sides are compared: the *rollout*'s logprobs, as the output has them, the *engine*'s
    as of now, and the *trainer*'s."""

    tolerance: float
    """Differences of logprobs, and relative ones of hidden states, up to this count as none."""
    temperature: float
    """Of the logprobs that were computed."""
    unrecorded: bool
    """The output has no logprobs of the kind "sampling": the engine, as it is now, stands for the rollout."""
    repeats: bool
    """Whether the engine, recomputed now, gives the rollout's logprobs again."""
    position: int | None
    """Of the first token of `output_ids` where rollout (or what stands for it) and trainer differ; None:
    nowhere."""
    largest: float
    """Largest difference of any token's logprob."""
    sampled_under: str
    """Version of the weights at that token (without one: at the last)."""
    engine_version: str
    """Version of the engine's weights now."""
    cached_tokens: int
    """Tokens of the prompt whose keys and values came out of the prefix cache."""
    different_weights: dict[str, str]
    """Name -> how the trainer's weight differs from the engine's now."""
    different_scalings: dict[str, str]
    """Name -> how the scaling of the output's adapter differs at one of the trainer's layers."""
    unlike: list[str]
    """Adapters and dtypes that differ, in sentences: no update of the weights makes up for those."""
    training: bool
    """The module was lent in train mode; it was compared in eval mode, without its dropout."""
    layers: list[tuple[str, float]]
    """(place, largest difference of the hidden states there relative to the largest value), up to that token,
    in the order of the forward."""
    token: int | None = None
    """The token there, its logprobs, and the most likely (logprob, id, text) there, best first."""
    rollout_logprob: float | None = None
    engine_logprob: float | None = None
    trainer_logprob: float | None = None
    engine_top: list[Triple] = field(default_factory=list)
    trainer_top: list[Triple] = field(default_factory=list)

    @property
    def first_layer(self) -> str | None:
        """Where hidden states of engine and trainer first differ; None: nowhere."""
        return next((place for place, gap in self.layers if not gap <= self.tolerance), None)

    @property
    def notes(self) -> list[str]:
        """What it comes to, in sentences."""
        found = []
        if self.unrecorded:
            found.append(
                'The output has no logprobs of the kind "sampling", so not the rollout was compared but the '
                "engine as it is now: generate with return_logprob=True."
            )
        if self.position is None:
            found.append(f"{self._sides} agree.")
            return found
        if self.sampled_under != self.engine_version:
            found.append(
                f"The token was sampled under version {self.sampled_under!r}, and the engine has moved on to "
                f"{self.engine_version!r}."
            )
        found += self.unlike or self._why()
        if self.training:
            found.append("The module is in train mode; it was compared in eval mode, without its dropout.")
        return found

    @property
    def _sides(self) -> str:
        if self.unrecorded:
            return (
                f"Engine (version {self.engine_version!r}; sampled under {self.sampled_under!r}) and trainer"
            )
        return "Rollout and trainer"

    def _why(self) -> list[str]:
        """Reasons that lie in the weights or in the computation."""
        found = []
        if self.different_weights:
            count = len(self.different_weights)
            found.append(f"Engine and module differ in {count} of the weights: an update is due.")
        if self.different_scalings:
            count = len(self.different_scalings)
            found.append(
                f"The adapter's scaling differs in {count} of its layers: weights_changed() reads it anew, "
                "from the module that is shared."
            )
        if not self.repeats and self.sampled_under == self.engine_version:
            found.append(
                "Recomputed now, the engine does not repeat the rollout's logprobs: they are of other "
                "weights (written without weights_changed()?), of KV kept across an update, or of another "
                f"temperature than {self.temperature:g}."
            )
        if self.first_layer is None:
            found.append("Hidden states agree: what differs is the head, the temperature, or past weights.")
        elif not (self.different_weights or self.different_scalings):
            found.append(
                f"With equal weights, engine and trainer part at {self.first_layer}: another computation."
            )
        return found

    def __str__(self) -> str:
        lines = [
            *self.notes,
            f"largest difference of a logprob at temperature {self.temperature:g}: {self.largest:.2e} "
            f"(up to {self.tolerance:.0e} counts as none)",
        ]
        if self.position is not None:
            lines += [
                f"first at output token {self.position} (id {self.token}), sampled under version "
                f"{self.sampled_under!r}; the engine is at {self.engine_version!r}",
                f"  logprob: rollout {_number(self.rollout_logprob)}, engine now "
                f"{_number(self.engine_logprob)}, trainer {_number(self.trainer_logprob)}",
                f"  engine's top:  {_row(self.engine_top)}",
                f"  trainer's top: {_row(self.trainer_top)}",
            ]
        lines.append(f"tokens of the prompt out of the prefix cache: {self.cached_tokens}")
        lines += [f"weight {name}: {how}" for name, how in list(self.different_weights.items())[:_SHOWN]]
        lines += [f"scaling {name}: {how}" for name, how in list(self.different_scalings.items())[:_SHOWN]]
        lines.append(
            "hidden states, engine and trainer: largest difference, relative to the largest value there"
        )
        lines += [f"  {place:<14} {gap:.2e}" for place, gap in self.layers]
        return "\n".join(lines)


def _number(value: float | None) -> str:
    return "not recorded" if value is None else f"{value:.5f}"


def _row(top: list[Triple]) -> str:
    return ", ".join(
        f"{token}{'' if text is None else f' {text!r}'} {value:.3f}" for value, token, text in top
    )
