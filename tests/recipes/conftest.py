"""Recipes as the command line makes them: composed, parsed, and small."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tokenspeed_rl.recipes.ppo import PPORecipe
from tokenspeed_rl.recipes.settings import parse
from tokenspeed_rl.recipes.sft import SFTRecipe
from tokenspeed_rl.recipes.task import Task

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = (
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "model.head_dim=8",
    "model.num_layers=2",
    "task.held_out=8",
    "evaluation.samples=1",
    "imitation.demonstrations=64",
    "imitation.batch_size=32",
    "imitation.steps=3",
)

Composer = Callable[..., DictConfig]
PPOMaker = Callable[..., PPORecipe]


@pytest.fixture(scope="session")
def composer() -> Iterator[Composer]:
    """`composer("ppo", "seed=1", ...)` composes as the command line does."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        yield lambda name, *overrides: compose(name, list(overrides))


@pytest.fixture(scope="session")
def small_ppo(composer: Composer) -> PPOMaker:
    """`small_ppo("trainer.steps=2", ...)`: settings of a PPO run that takes a second or two."""
    small = (*SMALL, "rollout.prompts=12", "trainer.minibatch_size=6", "trainer.steps=2")
    return lambda *overrides: parse(composer("ppo", *small, *overrides), PPORecipe)


@pytest.fixture(scope="session")
def small_sft(composer: Composer) -> Callable[..., SFTRecipe]:
    return lambda *overrides: parse(composer("sft", *SMALL, *overrides), SFTRecipe)


@pytest.fixture
def policy(small_ppo: PPOMaker) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A tiny model with seeded random weights, and its tokenizer."""
    torch.manual_seed(0)
    model, tokenizer = small_ppo().model.build()
    return model, tokenizer


@pytest.fixture
def task(small_ppo: PPOMaker, policy: tuple[PreTrainedModel, PreTrainedTokenizerFast]) -> Task:
    """Words to spell backwards, eight of them held out."""
    return Task(small_ppo().task, policy[1], seed=0)
