"""A reward model behind an engine scores samples as transformers does, and says why where it can't."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from tests.heads import EXACT, Heads
from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.rl.reward_model import RewardModel
from tokenspeed_rl.rl.rewards import RewardError, RewardTimeoutError, Scorer
from tokenspeed_rl.rl.sample import Sample


def sample(prompt: list[int], output: list[int]) -> Sample:
    return Sample(
        prompt=None, prompt_ids=prompt, group=0, index=0, output_ids=output, logprobs=[0.0] * len(output)
    )


def test_scores_of_whole_sequences() -> None:
    """Issue 4, item 2: prompt and output are one sequence; all samples are scored together."""
    model = Heads.model("score", "qwen3")
    samples = [sample(Tiny.prompt(3, seed=at), Tiny.prompt(at, seed=at + 1)) for at in range(8)]
    with Engine(model, max_total_tokens=1024) as engine:
        scorer = Scorer(RewardModel(engine.client), concurrency=8)
        with Tiny.held(engine):
            scoring = asyncio.run_coroutine_threadsafe(scorer.score(samples), engine.llm._loop)
            while engine.get_load()[0].num_reqs < 8:
                assert not scoring.done()
        rewards = scoring.result(20)
        assert Tiny.state(engine)["steps"] == 1
    for one, reward in zip(samples, rewards, strict=True):
        expected = Heads.expected(model, [*one.prompt_ids, *one.output_ids]).item()
        assert reward == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize("labels", [2, None])
def test_other_models_are_refused_at_once(labels: int | None) -> None:
    """A model of several scores, or a causal LM, is no reward model."""
    model = Tiny.model() if labels is None else Heads.model("score", num_labels=labels)
    with (
        Engine(model, max_total_tokens=64) as engine,
        pytest.raises(ConfigError, match="generates" if labels is None else "gives 2 scores"),
    ):
        RewardModel(engine.client)


def test_failures_are_named() -> None:
    """H4: a value model, a score that is no number and an engine that sleeps surface as the reward's failure;
    nothing is left in the engine."""
    values = Heads.model("values")
    with (
        Engine(values, max_total_tokens=64) as engine,
        pytest.raises(RewardError, match=r"reward model.*a value for each token"),
    ):
        asyncio.run(Scorer(RewardModel(engine.client)).score([sample([1], [2])]))
    model = Heads.model("score")
    with torch.no_grad():
        model.score.weight.fill_(torch.nan)
    with Engine(model, max_total_tokens=64) as engine:
        score: Any = Scorer(RewardModel(engine.client), timeout=0.2).score
        with pytest.raises(RewardError, match="gave no score: the model's scores are not finite"):
            asyncio.run(score([sample([1], [2])]))
        engine.pause("keep")
        with pytest.raises(RewardTimeoutError):
            asyncio.run(score([sample([1], [2])]))
        engine.resume()
        Tiny.all_back(engine)
