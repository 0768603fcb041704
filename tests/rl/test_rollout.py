"""The rollout loop against a scripted engine: grouping, rewards, seeds, and what failures leave behind."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tokenspeed_rl.errors import ConfigError, EngineShutdownError, RequestError, TokenSpeedError
from tokenspeed_rl.rl.rewards import RewardError, RewardTimeoutError
from tokenspeed_rl.rl.rollout import RolloutLoop
from tokenspeed_rl.rl.sample import Sample
from tokenspeed_rl.rl.trajectory import TrajectoryBatch

PROMPTS = [
    {"input_ids": [1, 10], "answer": 0},
    {"input_ids": [11], "answer": 1},
    {"input_ids": [1, 1, 12], "answer": 2},
]
ABORT = {"type": "abort", "message": "non-finite logits"}


def reward(sample: Sample) -> float:
    """Tells prompts and samples apart: 10 x the prompt's answer + the number of the sample."""
    return 10 * sample.prompt["answer"] + sample.output_ids[1]


def make(client: Any, reward: Any = reward, **settings: Any) -> RolloutLoop:
    settings = {
        "n": 2,
        "pad_token_id": 0,
        "sampling_params": {"temperature": 0.7, "max_new_tokens": 8},
        **settings,
    }
    return RolloutLoop(client, reward, **settings)


def collect(loop: RolloutLoop, prompts: Any = PROMPTS, **step: int) -> TrajectoryBatch:
    return asyncio.run(loop.collect(prompts, **step))


def test_one_request_makes_one_batch(client: Any) -> None:
    """One request for all prompts, with n samples and logprobs; groups and rewards sit on their samples."""
    batch = collect(make(client, sampling_params={"temperature": 0.7, "max_new_tokens": 8, "top_p": 0.9}))
    (request,) = client.requests
    assert [list(ids) for ids in request.input_ids] == [p["input_ids"] for p in PROMPTS]
    assert request.return_logprob
    assert not request.stream
    for params in request.sampling_params:
        assert (params.n, params.temperature, params.max_new_tokens, params.top_p) == (2, 0.7, 8, 0.9)
        assert params.seed is None
    assert batch.groups.tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.rewards.tolist() == [0, 1, 10, 11, 20, 21]
    assert batch.input_ids.tolist() == [
        [1, 10, 10, 0, 5, 0],
        [1, 10, 10, 1, 5, 0],
        [11, 11, 0, 5, 0, 0],
        [11, 11, 1, 5, 0, 0],
        [1, 1, 12, 12, 0, 5],
        [1, 1, 12, 12, 1, 5],
    ]
    assert batch.action_mask.int().sum(1).tolist() == [3] * 6
    assert batch.logprobs[2].tolist() == [0, -1, -2, -3, 0, 0]
    assert batch.versions == [(("default", 0, 3),)] * 6
    assert batch.texts == ["t0", "t1"] * 3
    assert [s.prompt is PROMPTS[s.group] for s in batch.samples] == [True] * 6
    assert batch.seconds.keys() == {"generate", "score"}
    assert client.aborted == []


@dataclass
class Problem:
    """A prompt as a small struct, its ids a tensor."""

    input_ids: torch.Tensor
    answer: str


class Tokenizer:
    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]


def test_prompts_are_structs_or_text_too(client: Any) -> None:
    """Token in, token out: ids are used as they are; text is tokenised once, and those ids are trained on."""
    client.tokenizer = Tokenizer()
    prompts = [Problem(torch.tensor([7, 8]), "x"), {"text": "ab", "answer": "y"}]
    seen: list[Any] = []
    batch = collect(make(client, lambda s: seen.append(s.prompt) or 1.0, n=1), prompts)
    assert batch.input_ids.tolist() == [[7, 8, 8, 0, 5], [97, 98, 98, 0, 5]]
    assert client.requests[0].text is None
    assert sorted(map(id, seen)) == sorted(map(id, prompts))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts must not be empty"),
        ([{"input_ids": [1]}, {"answer": 3}], "prompt 1 must have input_ids, or text"),
        ([{"text": "no tokenizer here"}], "prompt 0 must have input_ids, or text"),
        ([{"input_ids": "12"}], "input_ids of prompt 0"),
        ([{"input_ids": [1, -3]}], "input_ids of prompt 0"),
        ([{"input_ids": [[1, 2]]}], r"input_ids of prompt 0\[0\]"),
        ([{"input_ids": [1]}, {"input_ids": []}], r"input_ids\[1\]"),
    ],
)
def test_malformed_prompts_are_refused(client: Any, prompts: list[Any], message: str) -> None:
    """A prompt that is none is named by its place, before or by the engine, and nothing is left behind."""
    with pytest.raises(RequestError, match=message):
        collect(make(client), prompts)


def test_seeds_follow_prompts_not_batches(client: Any) -> None:
    """F5, H8: with a seed, (seed, step, prompt) fix a prompt's draws in any batch; else the engine's does."""
    loop = make(client, seed=3)

    def seeds(prompts: Any, step: int) -> list[int]:
        collect(loop, prompts, step=step)
        return [params.seed for params in client.requests[-1].sampling_params]

    first = seeds(PROMPTS, 4)
    assert len(set(first)) == 3
    assert seeds(PROMPTS[::-1], 4) == first[::-1]
    assert seeds(PROMPTS[1:], 4) == first[1:]
    assert not set(seeds(PROMPTS, 5)) & set(first)
    named = [
        {**PROMPTS[0], "id": "a"},
        {**PROMPTS[0], "id": "b"},
        {**PROMPTS[1], "id": "b"},
        {**PROMPTS[1], "id": 0},
    ]
    assert len(set(seeds(named, 4))) == 4
    assert seeds([named[1]], 4) == [seeds(named, 4)[1]]
    with pytest.raises(RequestError, match="needs the step"):
        collect(loop)


def test_abstaining_masks_and_counts(client: Any) -> None:
    """H4: a sample whose reward is None has no action and no reward; 0.0 is a reward."""
    batch = collect(make(client, lambda s: None if s.group == 1 else 0.0))
    assert batch.rewards.isnan().tolist() == [False, False, True, True, False, False]
    assert batch.action_mask.any(1).tolist() == [True, True, False, False, True, True]
    assert batch.counts() == {"samples": 6, "actions": 12, "truncated": 0, "aborted": 0, "unrewarded": 2}


def test_aborted_samples_are_masked_and_not_scored(client: Any) -> None:
    """An aborted sample, also one without a token, stays as a row that teaches nothing; its group goes on."""
    client.script = lambda ids, index: (
        {"finish_reason": ABORT, "output_ids": []} if (ids[-1], index) == (11, 0) else {}
    )
    scored: list[tuple[int, int]] = []
    batch = collect(make(client, lambda s: scored.append((s.group, s.index)) or 1.0))
    assert sorted(scored) == [(0, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    assert batch.counts() == {"samples": 6, "actions": 15, "truncated": 0, "aborted": 1, "unrewarded": 1}
    assert batch.finish_reasons[2] == "abort"
    assert batch.rewards.isnan().tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_truncated_samples(client: Any, mask_truncated: bool) -> None:
    """H12: samples that end in "length" are counted, scored, and learnt from only where so configured."""
    client.script = lambda ids, index: {"finish_reason": {"type": "length", "length": 3}} if index else {}
    batch = collect(make(client, mask_truncated=mask_truncated))
    assert batch.truncated.tolist() == [False, True] * 3
    assert batch.counts()["truncated"] == 3
    assert batch.rewards.tolist() == [0, 1, 10, 11, 20, 21]
    assert batch.action_mask.any(1).tolist() == [True, not mask_truncated] * 3


@pytest.mark.parametrize(("kind", "first"), [("sampling", -1.0), ("raw", -1.25), ("processed", -1.5)])
def test_logprob_kinds(client: Any, kind: str, first: float) -> None:
    """The batch holds logprobs of the kind asked for."""
    batch = collect(make(client, logprob_kind=kind))
    assert batch.logprobs[0, 2].item() == first
    assert tuple(client.requests[0].logprob_kinds) == (kind,)


def failing(sample: Sample) -> float:
    raise KeyError("answer")


async def endless(sample: Sample) -> float:
    await asyncio.Event().wait()
    return 1.0


@pytest.mark.parametrize(
    ("reward", "error", "message"),
    [
        (failing, RewardError, "'failing' failed on sample 0 of prompt 0: KeyError"),
        (endless, RewardTimeoutError, "'endless' did not return for sample 0 of prompt 0 within 0.1 s"),
    ],
)
def test_a_failing_reward_surfaces(client: Any, reward: Any, error: type[Exception], message: str) -> None:
    """H4: what goes wrong in the reward ends `collect` with the names of reward and sample."""
    with pytest.raises(error, match=message):
        collect(make(client, reward, reward_timeout=0.1, reward_concurrency=1))
    assert client.aborted == []


def test_a_failure_of_the_engine_surfaces(client: Any) -> None:
    """The engine's error reaches the caller as it is, and whatever of the batch is still live is aborted."""
    client.failure = EngineShutdownError("the engine was shut down")
    with pytest.raises(EngineShutdownError):
        collect(make(client))
    assert len(client.aborted) == 3


def test_cancelling_collect_aborts_its_requests(client: Any) -> None:
    """G7: a cancelled rollout leaves nothing running in the engine, and lets another one go on."""

    async def main() -> None:
        client.gate = asyncio.Event()
        loop = make(client)
        first, second = (asyncio.create_task(loop.collect(PROMPTS)) for _ in range(2))
        await asyncio.sleep(0.01)
        assert len(client.live) == 6
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert set(client.aborted) == set(client.requests[0].rid)
        assert client.live == set(client.requests[1].rid)
        client.gate.set()
        assert len(await second) == 6

    asyncio.run(main())


def test_cancelling_while_scoring_cancels_the_rewards(client: Any) -> None:
    """A rollout cancelled in its rewards stops at once."""
    cancelled: list[str] = []

    async def slow(sample: Sample) -> float:
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            cancelled.append(sample.name)
            raise
        return 1.0

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(make(client, slow).collect(PROMPTS), timeout=0.1)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert len(cancelled) == 6


SCRAMBLES: dict[str, Callable[[list[Any]], list[Any]]] = {
    "a sample missing": lambda results: results[:-1],
    "samples interleaved": lambda results: results[::2] + results[1::2],
    "nothing": lambda results: [],
}


@pytest.mark.parametrize("scramble", SCRAMBLES)
def test_answers_that_would_mix_up_groups_are_refused(client: Any, scramble: str) -> None:
    """A client that breaks the order of results is an error, not a batch with rewards on other prompts."""
    generate = client.generate_request

    async def scrambled(obj: Any) -> Any:
        async for results in generate(obj):
            yield SCRAMBLES[scramble](results)

    client.generate_request = scrambled
    with pytest.raises(TokenSpeedError, match="3 prompts with 2 adjacent samples each"):
        collect(make(client))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 1, "needs_groups": True}, "n must be at least 2"),
        ({"n": 0}, "n must be at least 1"),
        ({"pad_token_id": -1}, "pad_token_id"),
        ({"sampling_params": {"n": 4}}, "n and seed are the loop's"),
        ({"sampling_params": {"seed": 4}}, "n and seed are the loop's"),
        ({"sampling_params": {"temprature": 1.0}}, "temperature"),
        ({"sampling_params": {"temperature": -1.0}}, "temperature must be"),
        ({"logprob_kind": "cooked"}, "logprob_kind must be one of sampling, raw, processed"),
        ({"reward_timeout": 0.0}, "timeout"),
        ({"reward_concurrency": 0}, "concurrency"),
        ({"seed": "x"}, "seed must be an integer"),
    ],
)
def test_bad_settings_are_refused_when_the_loop_is_made(
    client: Any, settings: dict[str, Any], message: str
) -> None:
    """H10, H14: a group of one where groups are needed, or a setting out of range, fails before a step."""
    with pytest.raises((ConfigError, RequestError), match=message):
        make(client, **settings)


def test_groups_are_asked_for_only_where_needed(client: Any) -> None:
    """H10: PPO with a value model runs with one sample per prompt."""
    assert len(collect(make(client, n=1))) == 3
    assert len(collect(make(client, n=2, needs_groups=True))) == 6
