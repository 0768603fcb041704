"""The rollout: prompts in, samples drawn and scored, a trajectory batch out."""

import dataclasses
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from tokenspeed_rl.errors import ConfigError, RequestError, TokenSpeedError
from tokenspeed_rl.protocol import EngineClient
from tokenspeed_rl.requests import LOGPROB_KINDS, GenerateReqInput, SamplingParamsLike
from tokenspeed_rl.rl.advantages import require_group
from tokenspeed_rl.rl.rewards import Reward, Scorer
from tokenspeed_rl.rl.sample import LogprobKind, Sample
from tokenspeed_rl.rl.seeds import prompt_seeds
from tokenspeed_rl.rl.trajectory import TrajectoryBatch
from tokenspeed_rl.sampling_params import SamplingParams, check_integer, check_token_ids


class RolloutLoop:
    """Draws `n` samples for every prompt and scores them.

    Args:
        client: the engine.
        reward: scores a sample (see `rewards.Reward`).
        sampling_params: everything but `n` and `seed`, which are the loop's.
        n: samples per prompt.
        pad_token_id: fills the batch behind shorter samples.
        seed: with `step`, keys every draw, so that a step can be repeated; None: the engine's own seed does.
        needs_groups: the trainer compares the samples of a prompt, so `n=1` is refused.
        logprob_kind: of the logprobs in the batch; "sampling" is what `token_logprobs` computes.
        mask_truncated: learn nothing from samples that ran into the length limit.
        reward_timeout: seconds for each call of the reward.
        reward_concurrency: calls of the reward at a time.

    Raises:
        ConfigError: settings that don't fit together.
        RequestError: a number or a field of `sampling_params` out of its range.
    """

    def __init__(
        self,
        client: EngineClient,
        reward: Reward,
        *,
        sampling_params: SamplingParamsLike | None = None,
        n: int,
        pad_token_id: int,
        seed: int | None = None,
        needs_groups: bool = False,
        logprob_kind: LogprobKind = "sampling",
        mask_truncated: bool = False,
        reward_timeout: float = 60.0,
        reward_concurrency: int = 16,
    ) -> None:
        self.client = client
        self.scorer = Scorer(reward, timeout=reward_timeout, concurrency=reward_concurrency)
        self.sampling_params = SamplingParams.coerce(sampling_params).validate(
            has_tokenizer=client.tokenizer is not None
        )
        self.n = check_integer("n", n, low=1)
        self.pad_token_id = check_integer("pad_token_id", pad_token_id, low=0)
        self.seed = seed if seed is None else check_integer("seed", seed)
        self.logprob_kind = logprob_kind
        self.mask_truncated = mask_truncated
        if needs_groups:
            require_group(self.n)
        if self.sampling_params.n != 1 or self.sampling_params.seed is not None:
            raise ConfigError(
                "n and seed are the loop's, not the sampling_params'",
                got=f"n={self.sampling_params.n}, seed={self.sampling_params.seed}",
                fix="Pass RolloutLoop(n=..., seed=...).",
            )
        if logprob_kind not in LOGPROB_KINDS:
            raise ConfigError(
                f"logprob_kind must be one of {', '.join(LOGPROB_KINDS)}",
                got=logprob_kind,
                fix="Pass 'sampling' to compare with the trainer's logprobs.",
            )

    async def collect(self, prompts: Sequence[Any], *, step: int | None = None) -> TrajectoryBatch:
        """One batch: `n` adjacent samples for each prompt, in the order of `prompts`.

        A prompt is a mapping, or an object with attributes: `input_ids` (used as they are), or else `text`
        for the engine's tokenizer; `id`, optional, stands for it in its seed (else its ids do). It comes back
        whole as `Sample.prompt`. `step` is needed with a `seed`: the same (seed, step, prompt) draws the same
        samples, whatever the batch.

        Samples that the reward abstains on, and aborted ones, which it isn't asked about, stay in the batch
        without reward or action. Nothing is left running in the engine when this raises or is cancelled:
        `RequestError` for a malformed prompt, `RewardError` and `RewardTimeoutError` as `Scorer.score`, and
        what the engine raises.
        """
        if not prompts:
            raise RequestError("prompts must not be empty", got=prompts, fix="Pass at least one prompt.")
        prompt_ids = [self._ids_of(prompt, at) for at, prompt in enumerate(prompts)]
        seeds = self._seeds(prompts, prompt_ids, step)
        started = time.perf_counter()
        outputs = await self._generate(prompt_ids, seeds)
        generated = time.perf_counter()
        samples = [
            Sample.from_output(
                output,
                prompt=prompts[at // self.n],
                prompt_ids=prompt_ids[at // self.n],
                group=at // self.n,
                logprob_kind=self.logprob_kind,
            )
            for at, output in enumerate(outputs)
        ]
        rewards = await self._score(samples)
        batch = TrajectoryBatch.from_samples(
            samples, rewards, pad_token_id=self.pad_token_id, mask_truncated=self.mask_truncated
        )
        batch.seconds.update(generate=generated - started, score=time.perf_counter() - generated)
        return batch

    async def _generate(
        self, prompt_ids: Sequence[Sequence[int]], seeds: Sequence[int | None]
    ) -> Sequence[Mapping[str, Any]]:
        call = uuid.uuid4().hex
        rids = [f"rollout-{call}-{at}" for at in range(len(prompt_ids))]
        request = GenerateReqInput(
            input_ids=prompt_ids,
            sampling_params=[dataclasses.replace(self.sampling_params, n=self.n, seed=s) for s in seeds],
            rid=rids,
            return_logprob=True,
            logprob_kinds=(self.logprob_kind,),
        )
        outputs: list[Any] = []
        async with aclosing(self.client.generate_request(request)) as replies:
            try:
                reply: Any
                async for reply in replies:
                    outputs.extend(reply)  # one reply, a list, as the request holds a list
            except BaseException:
                for rid in rids:
                    self.client.abort_request(rid)
                raise
        got = [(output["meta_info"]["id"], output["meta_info"]["index"]) for output in outputs]
        if got != [(rid, index) for rid in rids for index in range(self.n)]:
            raise TokenSpeedError(
                f"the engine must answer {len(rids)} prompts with {self.n} adjacent samples each, in order",
                got=got,
                fix="Check the client: EngineClient documents the order of a batch's results.",
            )
        return outputs

    async def _score(self, samples: Sequence[Sample]) -> list[float | None]:
        rewards = iter(await self.scorer.score([sample for sample in samples if not sample.aborted]))
        return [None if sample.aborted else next(rewards) for sample in samples]

    def _seeds(
        self, prompts: Sequence[Any], prompt_ids: Sequence[tuple[int, ...]], step: int | None
    ) -> Sequence[int | None]:
        if self.seed is None:
            if step is not None:
                raise RequestError("step needs a loop with a seed", fix="Pass RolloutLoop(seed=...).")
            return [None] * len(prompts)
        if step is None:
            raise RequestError("a loop with a seed needs the step", fix="Pass collect(prompts, step=step).")
        names = [_field(prompt, "id") for prompt in prompts]
        keys = [ids if name is None else str(name) for name, ids in zip(names, prompt_ids, strict=True)]
        return prompt_seeds(self.seed, step, keys)

    def _ids_of(self, prompt: Any, at: int) -> tuple[int, ...]:
        ids, text = _field(prompt, "input_ids"), _field(prompt, "text")
        if ids is None and text is not None and self.client.tokenizer is not None:
            ids = self.client.tokenizer.encode(text)
        if ids is None:
            raise RequestError(
                f"prompt {at} must have input_ids, or text and an engine with a tokenizer",
                got=prompt,
                fix="Pass {'input_ids': [...]} beside what the reward needs.",
            )
        return check_token_ids(f"input_ids of prompt {at}", getattr(ids, "tolist", lambda: ids)(), None)


def _field(prompt: Any, name: str) -> Any:
    return prompt.get(name) if isinstance(prompt, Mapping) else getattr(prompt, name, None)
