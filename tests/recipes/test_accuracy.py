"""Accuracy: shares of right answers, counted per response."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tokenspeed_rl import SamplingParams
from tokenspeed_rl.recipes.accuracy import measure
from tokenspeed_rl.recipes.task import Task


def test_shares_are_counted_per_response(task: Task) -> None:
    """Greedy counts problems, sampled counts all samples; each problem draws with a seed of its own."""
    asked: list[list[SamplingParams]] = []

    def generate(
        *, input_ids: Sequence[list[int]], sampling_params: list[SamplingParams]
    ) -> list[dict[str, Any]]:
        """Greedily right on the first six of eight problems; of three samples only the first is right."""
        assert list(input_ids) == [problem.input_ids for problem in task.held_out]
        asked.append(sampling_params)
        outputs = []
        for at, (problem, params) in enumerate(zip(task.held_out, sampling_params, strict=True)):
            for index in range(params.n):
                right = index == 0 if params.n > 1 else at < 6
                outputs.append({"text": problem.answer if right else problem.answer + "!"})
        return outputs

    engine: Any = SimpleNamespace(generate=generate)
    params = SamplingParams(max_new_tokens=8, temperature=0.7)
    accuracy = measure(engine, task, params, samples=3, seed=5)
    assert (accuracy.greedy, accuracy.sampled) == (6 / 8, 1 / 3)
    assert [score == 1.0 for _, _, score in accuracy.responses] == [True] * 6 + [False] * 2
    assert accuracy.responses[0][:2] == (task.held_out[0].question, task.held_out[0].answer)
    greedy, sampled = asked
    assert {(p.temperature, p.n, p.max_new_tokens) for p in greedy} == {(0.0, 1, 8)}
    assert {(p.temperature, p.n, p.max_new_tokens) for p in sampled} == {(0.7, 3, 8)}
    assert len({p.seed for p in sampled}) == 8
    measure(engine, task, params, samples=3, seed=5)
    assert asked[3] == sampled
