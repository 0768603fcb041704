"""Verifiable problems out of reasoning-gym: sets without a common question, prompts in tokens, and scores."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.recipes.settings import setting
from tokenspeed_rl.rl.sample import Sample

ITEMS_PER_SPLIT = 1 << 24
SPLITS = ("held_out", "practice", "demonstrations")
FRUITLESS_DRAWS = 1000


@dataclass(slots=True, kw_only=True)
class TaskConfig:
    """Which problems, and how a policy is asked and understood."""

    dataset: str = MISSING
    """A data set of reasoning-gym, by name."""
    options: dict[str, Any] = field(default_factory=dict)
    """That data set's own settings."""
    prompt: str = "{question}"
    """What the policy reads: a template of the question and the item's metadata."""
    system: str | None = None
    """System message for a policy with a chat template."""
    chat: bool = False
    """Put the prompt through the tokenizer's chat template, as a user's message."""
    answer: str = r"(?s)\A(.*)\Z"
    """Regular expression whose first group is the answer in a response: of its last match; none scores 0."""
    wrong_answer: str | None = None
    """Template, of the same fields as `prompt`, of the answer in a demonstration that is wrong."""
    held_out: int = setting(200, low=1)
    """Problems that accuracy is measured on."""

    def validate(self) -> None:
        """Raises ConfigError, naming the field, for options or templates that don't fit the data set."""
        try:
            groups = re.compile(self.answer).groups
        except re.error as error:
            raise ConfigError(f"answer: {error}", got=self.answer) from error
        if groups < 1:
            raise ConfigError("answer needs a group around the answer", got=self.answer)
        fields = fields_of(self.open_dataset(0)[0])
        for key in ("prompt", "wrong_answer"):
            template = getattr(self, key)
            try:
                (template or "").format(**fields)
            except (KeyError, IndexError, ValueError) as error:
                names = ", ".join(fields)
                raise ConfigError(f"{key} must be a template of {names}", got=template) from error

    def open_dataset(self, seed: int) -> Any:
        """The reasoning-gym data set whose item `i` comes from `random.Random(seed + i)`."""
        import reasoning_gym

        size = ITEMS_PER_SPLIT * len(SPLITS)
        try:
            return reasoning_gym.create_dataset(self.dataset, seed=seed, size=size, **self.options)
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(f"dataset={self.dataset} with options={dict(self.options)}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One question, how the policy reads it, and what its verifier needs."""

    question: str
    input_ids: list[int]
    answer: str
    wrong_answer: str | None
    entry: Mapping[str, Any]


class Task:
    """Problems of one seed. No question, whatever its case, is handed out twice.

    reasoning-gym makes item `i` of seed `s` from `Random(s + i)`, so neighbouring seeds share most. Each
    seed and each split therefore draws from a range of its own, and a question drawn before is skipped.
    """

    def __init__(self, config: TaskConfig, tokenizer: Any, seed: int) -> None:
        self.config = config
        self._tokenizer = tokenizer
        self._dataset = config.open_dataset(seed * ITEMS_PER_SPLIT * len(SPLITS))
        self._pattern = re.compile(config.answer)
        self._items = {split: itertools.count(i * ITEMS_PER_SPLIT) for i, split in enumerate(SPLITS)}
        self._seen: set[str] = set()
        self.held_out = self.draw("held_out", config.held_out)

    def draw(self, split: str, count: int) -> list[Problem]:
        """The next `count` problems of a split; ConfigError when the task has no more that are new."""
        problems: list[Problem] = []
        misses = 0
        while len(problems) < count:
            entry = self._dataset[next(self._items[split])]
            question = entry["question"].casefold()
            if question not in self._seen:
                self._seen.add(question)
                problems.append(self._problem(entry))
                misses = 0
            elif (misses := misses + 1) == FRUITLESS_DRAWS:
                raise ConfigError(
                    f"task.options: {self.config.dataset} has only some {len(self._seen)} distinct questions",
                    fix="Widen them, or take fewer steps.",
                )
        return problems

    def score(self, text: str, problem: Problem) -> float:
        """The verifier's score of a response, from 0 to 1; only a right answer gets 1."""
        answers = [match.group(1) for match in self._pattern.finditer(text)]
        return float(self._dataset.score_answer(answers[-1], problem.entry)) if answers else 0.0

    async def reward(self, sample: Sample) -> float:
        """`score`, for a rollout of problems. Async, as it is too quick to be worth a thread of its own."""
        return self.score(sample.text, sample.prompt)

    def _problem(self, entry: Mapping[str, Any]) -> Problem:
        fields = fields_of(entry)
        wrong = self.config.wrong_answer
        return Problem(
            question=entry["question"],
            input_ids=self._encode(self.config.prompt.format(**fields)),
            answer=entry["answer"],
            wrong_answer=None if wrong is None else wrong.format(**fields),
            entry=entry,
        )

    def _encode(self, prompt: str) -> list[int]:
        if not self.config.chat:
            return list(self._tokenizer(prompt, add_special_tokens=False)["input_ids"])
        messages = [{"role": "user", "content": prompt}]
        if self.config.system is not None:
            messages.insert(0, {"role": "system", "content": self.config.system})
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def fields_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What a template may name: the question and the item's metadata."""
    return {**entry["metadata"], "question": entry["question"]}
