"""Where a rollout's reward comes from: the task's verifier, or a reward model in an engine of its own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from tokenspeed_rl import Engine, EngineConfig
from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.recipes.task import Task
from tokenspeed_rl.rl.reward_model import RewardModel
from tokenspeed_rl.rl.rewards import Reward
from tokenspeed_rl.rl.sample import Sample
from tokenspeed_rl.weights import read_config

ASKED_AT_ONCE = 256
"""Samples that a reward model scores together."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a rollout loop needs of it, and what a run measures beside it."""

    reward: Reward
    concurrency: int = 16
    resident: Callable[[], AbstractContextManager[None]] = nullcontext
    """Within, it can score."""
    metrics: Callable[[Sequence[Sample]], dict[str, float]] = lambda samples: {}


@dataclass(slots=True, kw_only=True)
class RewardConfig:
    """What scores a sample."""

    def open(self, task: Task, tokenizer: Any) -> AbstractContextManager[Source]:
        """The source of rewards for `task`, read in `tokenizer`'s ids; within, it lives."""
        raise ConfigError(f"reward: {type(self).__name__} scores nothing; choose one of verifier, model")


@dataclass(slots=True, kw_only=True)
class VerifierReward(RewardConfig):
    """The task's own verifier, from 0 to 1."""

    def open(self, task: Task, tokenizer: Any) -> AbstractContextManager[Source]:
        return nullcontext(Source(task.reward))


@dataclass(slots=True, kw_only=True)
class ModelReward(RewardConfig):
    """A reward model. What is right, the task's verifier still says."""

    path: str = MISSING
    """Hugging Face directory of a sequence classifier with one label, over the policy's vocabulary."""
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(weights_backup="cpu"))
    """Without a backup its weights stay resident, else it sleeps but where it scores."""

    def validate(self) -> None:
        """Raises ConfigError unless a reward model lies at `path`."""
        if not (Path(self.path) / "config.json").is_file():
            raise ConfigError("path must be a Hugging Face directory, with a config.json", got=self.path)
        config = read_config(Path(self.path))
        named = ", ".join(config.architectures or ()) or "no architecture"
        if not named.endswith("ForSequenceClassification") or config.num_labels != 1:
            raise ConfigError(
                "path must hold a ...ForSequenceClassification with one label",
                got=f"{named} with {config.num_labels} labels",
            )

    @contextmanager
    def open(self, task: Task, tokenizer: Any) -> Iterator[Source]:
        with Engine(self.path, config=self.engine) as engine:
            check_vocabulary(engine, tokenizer)
            reward = RewardModel(engine.client)
            keeps = self.engine.weights_backup == "none"
            engine.release_memory_occupation(["kv_cache", "cuda_graph"] if keeps else None)

            def right(samples: Sequence[Sample]) -> dict[str, float]:
                scores = [task.score(sample.text, sample.prompt) for sample in samples]
                return {"right": sum(score >= 1.0 for score in scores) / len(scores)}

            yield Source(reward, ASKED_AT_ONCE, engine.resident, right)


def check_vocabulary(engine: Engine, tokenizer: Any) -> None:
    """Raises ConfigError where the reward model would read other tokens than the policy writes."""
    size = engine.client.model_config.vocab_size
    if len(tokenizer) > size:
        raise ConfigError(
            f"reward.path: the model has {size} token ids, the policy {len(tokenizer)}",
            fix="Take a reward model over the policy's vocabulary.",
        )
    own = {} if engine.client.tokenizer is None else engine.client.tokenizer.get_vocab()
    others = [token for token, number in tokenizer.get_vocab().items() if own.get(token, number) != number]
    if others:
        raise ConfigError(
            f"reward.path: the model's tokenizer has other ids than the policy's for {len(others)} tokens",
            got=others[:3],
            fix="Take a reward model over the policy's vocabulary.",
        )
