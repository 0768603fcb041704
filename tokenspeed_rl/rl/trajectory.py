"""Samples and their rewards as padded tensors: what a trainer learns from."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.rl.sample import LogprobKind, Sample, VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryBatch:
    """B samples, padded on the right to T tokens; entry `t` of a [B, T] tensor speaks of `input_ids[:, t]`.

    So the logprob and the value that belong to the action at `t` come from a model's output at `t - 1`
    (`token_logprobs` does that shift). Tensors are on the CPU until `to` moves them.
    """

    input_ids: Tensor
    """[B, T] int64: prompt, output, padding."""
    attention_mask: Tensor
    """[B, T] bool: true on prompt and output."""
    action_mask: Tensor
    """[B, T] bool: true on tokens to learn from, EOS included; all false for samples left out."""
    logprobs: Tensor
    """[B, T] float32: the engine's logprobs of the actions, 0 elsewhere."""
    rewards: Tensor
    """[B] float32; NaN: the sample has no reward."""
    groups: Tensor
    """[B] int64: number of the sample's prompt."""
    truncated: Tensor
    """[B] bool: ended by a length limit."""
    samples: tuple[Sample, ...]
    """[B]: prompts, texts, finish reasons and version spans."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of B rows that the trainer adds (advantages, returns, ...); they follow `select` and `to`."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall-clock of the rollout's phases, `generate` and `score`."""

    @classmethod
    def from_samples(
        cls,
        samples: Sequence[Sample],
        rewards: Sequence[float | None],
        *,
        pad_token_id: int,
        mask_truncated: bool = False,
    ) -> Self:
        """Pads `samples`, in order. `rewards`: one per sample, None where it has none.

        Samples without a reward, and with `mask_truncated` the truncated ones, keep their row but have no
        action: nothing is learnt from them. A truncated one keeps its reward, which counts in its group.
        """
        if not samples or len(rewards) != len(samples):
            raise RequestError(
                "a batch needs at least one sample, and as many rewards as samples",
                got=f"{len(samples)} samples, {len(rewards)} rewards",
                fix="Pass None as the reward of a sample that has none.",
            )
        shape = len(samples), max(len(s.prompt_ids) + len(s.output_ids) for s in samples)
        input_ids = _filled(shape, pad_token_id, torch.int64)
        attention_mask = _filled(shape, False, torch.bool)
        action_mask = _filled(shape, False, torch.bool)
        logprobs = _filled(shape, 0.0, torch.float32)
        for row, (sample, reward) in enumerate(zip(samples, rewards, strict=True)):
            start, end = len(sample.prompt_ids), len(sample.prompt_ids) + len(sample.output_ids)
            input_ids[row, :end] = _tensor([*sample.prompt_ids, *sample.output_ids], torch.int64)
            attention_mask[row, :end] = True
            if reward is None or (mask_truncated and sample.truncated):
                continue
            chosen = sample.action_mask
            action_mask[row, start:end] = True if chosen is None else _tensor(chosen, torch.bool)
            logprobs[row, start:end] = _tensor(sample.logprobs, torch.float32)
        return cls(
            input_ids=input_ids,
            attention_mask=attention_mask,
            action_mask=action_mask,
            logprobs=torch.where(action_mask, logprobs, 0.0),
            rewards=_tensor([torch.nan if reward is None else reward for reward in rewards], torch.float32),
            groups=_tensor([sample.group for sample in samples], torch.int64),
            truncated=_tensor([sample.truncated for sample in samples], torch.bool),
            samples=tuple(samples),
        )

    @classmethod
    def from_outputs(
        cls,
        outputs: Sequence[Mapping[str, Any]],
        prompts: Sequence[Sequence[int]],
        rewards: Sequence[float | None],
        *,
        pad_token_id: int,
        mask_truncated: bool = False,
        logprob_kind: LogprobKind = "sampling",
    ) -> Self:
        """From the engine's results for `prompts` (lists of ids), prompt-major, as many samples for each."""
        n, left = divmod(len(outputs), max(len(prompts), 1))
        if not outputs or left:
            raise RequestError(
                "outputs are prompt-major, as many for each prompt",
                got=f"{len(outputs)} outputs for {len(prompts)} prompts",
                fix="Pass all results of one call.",
            )
        samples = [
            Sample.from_output(output, prompt=ids, prompt_ids=ids, group=group, logprob_kind=logprob_kind)
            for group, ids in enumerate(prompts)
            for output in outputs[group * n : (group + 1) * n]
        ]
        return cls.from_samples(samples, rewards, pad_token_id=pad_token_id, mask_truncated=mask_truncated)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def num_actions(self) -> int:
        """Tokens to learn from: the denominator of the losses when this is the whole batch."""
        return int(self.action_mask.sum())

    @property
    def texts(self) -> list[str]:
        """[B] the outputs' texts; empty without a tokenizer."""
        return [sample.text for sample in self.samples]

    @property
    def versions(self) -> list[tuple[VersionSpan, ...]]:
        """[B] which weights drew which tokens of the output (offsets count from the end of the prompt)."""
        return [sample.versions for sample in self.samples]

    @property
    def finish_reasons(self) -> list[str]:
        """[B] "stop", "length" or "abort"."""
        return [sample.finish_reason["type"] for sample in self.samples]

    def counts(self) -> dict[str, int]:
        """Samples and actions in the batch; samples truncated, aborted, and left without a reward."""
        return {
            "samples": len(self),
            "actions": self.num_actions,
            "truncated": int(self.truncated.sum()),
            "aborted": sum(sample.aborted for sample in self.samples),
            "unrewarded": int(self.rewards.isnan().sum()),
        }

    def select(self, index: Tensor | Sequence[int]) -> Self:
        """The rows `index` (int64 or bool tensor, or a list of numbers), in that order; T stays."""
        rows = torch.as_tensor(index, device="cpu")
        if rows.dtype == torch.bool:
            if rows.shape != (len(self),):
                raise RequestError(
                    f"a bool index must have one entry per row, {len(self)}",
                    got=tuple(rows.shape),
                    fix="Pass [B] bools, or row numbers.",
                )
            rows = rows.nonzero().squeeze(1)
        rows = rows.to(torch.int64)
        return self._with(
            lambda tensor: tensor[rows.to(tensor.device)], tuple(self.samples[i] for i in rows.tolist())
        )

    def to(self, device: torch.device | str) -> Self:
        """The same batch with every tensor on `device`."""
        return self._with(lambda tensor: tensor.to(device), self.samples)

    def minibatches(self, size: int, generator: torch.Generator | None = None) -> Iterator[Self]:
        """Parts of `size` rows, each row in exactly one; the last holds what is left, so it may be smaller.

        Shuffled by `generator` (a CPU one; the global RNG is never used), in order without one.
        """
        if size < 1:
            raise RequestError("size must be at least 1", got=size, fix="Pass the rows of a minibatch.")
        rows = len(self)
        order = range(rows) if generator is None else _shuffled(rows, generator)
        for start in range(0, rows, size):
            yield self.select(order[start : start + size])

    def _with(self, change: Callable[[Tensor], Tensor], samples: tuple[Sample, ...]) -> Self:
        tensors: dict[str, Any] = {
            f.name: change(value) for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)
        }
        extra = {name: change(tensor) for name, tensor in self.extra.items()}
        return replace(self, **tensors, samples=samples, extra=extra, seconds=dict(self.seconds))


# The process's default device and dtype are the trainer's to choose: here both are always said.


def _filled(shape: tuple[int, int], value: float, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, value, dtype=dtype, device="cpu")


def _tensor(values: Sequence[Any], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu")


def _shuffled(count: int, generator: torch.Generator) -> list[int]:
    order: list[int] = torch.randperm(count, generator=generator, device="cpu").tolist()
    return order
