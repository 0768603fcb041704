"""One finished sample: what the reward function is given, and what a trajectory batch is built from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

from tokenspeed_rl.errors import RequestError

LogprobKind = Literal["sampling", "raw", "processed"]


class VersionSpan(NamedTuple):
    """Tokens `[start, end)` of an output were drawn under the weights labelled `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The tokens that followed one prompt, and how they came about."""

    prompt: Any
    """The item given to `RolloutLoop.collect`, untouched: questions, answers, whatever the reward needs."""
    prompt_ids: Sequence[int]
    group: int
    """Number of the prompt within the batch; samples of one prompt share it."""
    index: int
    """Number of the sample within its prompt."""
    output_ids: Sequence[int]
    """Every token after the prompt, the stop or EOS token included."""
    logprobs: Sequence[float]
    """Logprob of each of `output_ids` when it was drawn; what observations hold here is not read."""
    action_mask: Sequence[bool] | None = None
    """Which of `output_ids` the policy chose; None: all. False marks observations of a multi-turn sample."""
    text: str = ""
    finish_reason: Mapping[str, Any] = field(default_factory=lambda: {"type": "stop"})
    versions: tuple[VersionSpan, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("logprobs", self.logprobs), ("action_mask", self.action_mask)):
            if value is not None and len(value) != len(self.output_ids):
                raise RequestError(
                    f"{name} of {self.name} must have one entry per output token, {len(self.output_ids)}",
                    got=len(value),
                    fix="Give every output token its own entry, observations too.",
                )

    @property
    def name(self) -> str:
        """For messages: which sample of which prompt."""
        return f"sample {self.index} of prompt {self.group}"

    @property
    def truncated(self) -> bool:
        """Ended by a length limit, not by its own EOS or a stop."""
        return bool(self.finish_reason["type"] == "length")

    @property
    def aborted(self) -> bool:
        """Ended from outside, or by a failure of its own (the finish reason's message says which)."""
        return bool(self.finish_reason["type"] == "abort")

    @classmethod
    def from_output(
        cls,
        output: Mapping[str, Any],
        *,
        prompt: Any,
        prompt_ids: Sequence[int],
        group: int,
        logprob_kind: LogprobKind = "sampling",
    ) -> Self:
        """A sample from one result of the engine; `RequestError` if it came without logprobs of that kind."""
        meta = output["meta_info"]
        key = "output_token_logprobs" + ("" if logprob_kind == "sampling" else f"_{logprob_kind}")
        if key not in meta:
            raise RequestError(
                f"a rollout needs the logprobs of its tokens, and this output has no {key!r}",
                got=sorted(meta),
                fix=f"Generate with return_logprob=True and {logprob_kind!r} in logprob_kinds.",
            )
        return cls(
            prompt=prompt,
            prompt_ids=prompt_ids,
            group=group,
            index=meta["index"],
            output_ids=output["output_ids"],
            logprobs=[logprob for logprob, _, _ in meta[key]],
            text=output["text"],
            finish_reason=meta["finish_reason"],
            versions=tuple(VersionSpan(**span) for span in meta["weight_versions"]),
        )
