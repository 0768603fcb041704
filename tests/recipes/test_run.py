"""A run's summary: what the last lines say."""

from pathlib import Path

import pytest

from tokenspeed_rl.recipes.accuracy import Accuracy
from tokenspeed_rl.recipes.run import Run
from tokenspeed_rl.recipes.schema import EvaluationConfig
from tokenspeed_rl.rl.sample import Sample
from tokenspeed_rl.rl.trajectory import TrajectoryBatch


def accuracy(greedy: float, sampled: float) -> Accuracy:
    return Accuracy(greedy=greedy, sampled=sampled, responses=[])


def rollout(rewards: list[float | None], seconds: float) -> TrajectoryBatch:
    samples = [
        Sample(prompt=None, prompt_ids=[1], group=i, index=0, output_ids=[2] * 5, logprobs=[0.0] * 5)
        for i in range(len(rewards))
    ]
    batch = TrajectoryBatch.from_samples(samples, rewards, pad_token_id=0)
    batch.seconds.update(generate=seconds, score=0.0)
    return batch


def test_the_last_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Accuracies as before -> after in percent, tokens per second of generating, its share of time."""
    with Run(EvaluationConfig(), str(tmp_path), columns=(), curves=("reward",)) as run:
        run.log_rollout(1, rollout([1.0, 0.5, None, 0.0], 0.5), {}, train=1.0)
        run.log_rollout(2, rollout([1.0, 1.0], 1.5), {}, train=1.0)
        facts = {"demonstrations": 4000, "wrong_demonstrations": 0.598}
        run.finish(accuracy(0.21, 0.1), accuracy(0.705, 1.0), facts=facts)
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("demonstrations: 4,000") :][:7] == [
        "demonstrations: 4,000",
        "wrong demonstrations: 59.8%",
        "greedy accuracy: 21.0% -> 70.5%",
        "sampled accuracy: 10.0% -> 100.0%",
        "tokens per second: 15",
        "share of time generating: 50.0%",
        "seconds learning: 4",
    ]
    first, second = run.tracker.history
    assert (first["reward"], first["right"]) == (0.5, pytest.approx(1 / 3))
    assert (second["reward"], second["tokens_per_second"]) == (1.0, 10 / 1.5)
