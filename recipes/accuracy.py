"""How many held-out problems the policy in an engine gets right."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenspeed_rl import Engine, SamplingParams
from tokenspeed_rl.recipes.task import Problem, Task
from tokenspeed_rl.rl.seeds import derive


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Shares of right answers, from 0 to 1, and the greedy responses themselves."""

    greedy: float
    sampled: float
    """Over all samples of all problems."""
    responses: list[tuple[str, str, float]]
    """(question, greedy response, score) of each problem."""


def measure(engine: Engine, task: Task, params: SamplingParams, *, samples: int, seed: int) -> Accuracy:
    """Answers `task.held_out` greedily once, and `samples` times as `params` say, keyed by `seed`."""
    greedy = answer(engine, task, [SamplingParams(max_new_tokens=params.max_new_tokens, temperature=0.0)])
    drawn = [
        SamplingParams(
            n=samples,
            max_new_tokens=params.max_new_tokens,
            temperature=params.temperature,
            seed=derive(seed, i),
        )
        for i in range(len(task.held_out))
    ]
    sampled = answer(engine, task, drawn)
    return Accuracy(
        greedy=share_right(greedy),
        sampled=share_right(sampled),
        responses=[(problem.question, text, score) for problem, text, score in greedy],
    )


def answer(engine: Engine, task: Task, params: Sequence[SamplingParams]) -> list[tuple[Problem, str, float]]:
    """(problem, response, score) of every sample, prompt-major. `params`: one, or one per problem."""
    each = list(params) if len(params) > 1 else list(params) * len(task.held_out)
    outputs = engine.generate(
        input_ids=[problem.input_ids for problem in task.held_out], sampling_params=each
    )
    problems = [problem for problem, p in zip(task.held_out, each, strict=True) for _ in range(p.n)]
    return [
        (problem, output["text"], task.score(output["text"], problem))
        for problem, output in zip(problems, outputs, strict=True)
    ]


def share_right(answers: Sequence[tuple[Problem, str, float]]) -> float:
    return sum(score >= 1.0 for _, _, score in answers) / len(answers)
