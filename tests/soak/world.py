"""The two engines of a soak, and what all threads know of them."""

from __future__ import annotations

import copy
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.soak.draws import Draws
from tests.soak.frozen import Frozen
from tests.soak.journal import Journal
from tests.soak.weights import Book, Weights
from tests.tiny import Tiny
from tokenspeed_rl import Engine

SETS = 6


@dataclass
class Side:
    """One of the engines, with the book of its versions and of what it froze."""

    name: str
    engine: Engine
    book: Book
    frozen: Frozen
    live: list[str] = field(default_factory=list)
    """Ids of requests that may be live."""


class World:
    """An engine with weights of its own, and one that shares those of a trainer's module."""

    def __init__(self, seed: int, family: str, folder: Path, journal: Journal) -> None:
        self.seed = seed
        self.journal = journal
        rng = random.Random(f"{seed}/world")
        self.weights = Weights(family, SETS, folder, tied=rng.random() < 0.3)
        options = engine_options(rng)
        backup = "cpu" if seed % 2 == 0 else "none"
        self.own = self._side("own", Engine(str(self.weights.folders[0]), weights_backup=backup, **options))
        self.modules = [self._module() for _ in range(2)]
        self.shared = self._side("shared", Engine(self.modules[0], **options))
        self.prompts = _prompts(seed)
        self.draws = Draws()
        self.trainer = threading.Lock()
        """Held by whoever writes the shared module, or pauses and resumes the engine that reads it."""
        self.trained = 0
        """Which of `modules` is shared."""

    def write(self, module: PreTrainedModel, number: int) -> None:
        """What an optimiser's step does: other values in the same places."""
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(self.weights.sets[number][name])

    def skeleton_of(self, number: int) -> PreTrainedModel:
        """A transformers model with a set's weights."""
        model = self._module()
        self.write(model, number)
        return model

    def shutdown(self) -> None:
        """End both engines."""
        self.own.engine.shutdown()
        self.shared.engine.shutdown()

    def _side(self, name: str, engine: Engine) -> Side:
        return Side(name, engine, Book(engine, self.weights, 0), Frozen(engine))

    def _module(self) -> PreTrainedModel:
        return copy.deepcopy(self.weights.skeleton)


def engine_options(rng: random.Random) -> dict[str, Any]:
    """Room for few tokens, so that requests are retracted, and steps that see only parts of a prompt."""
    return {
        "device": "cpu",
        "page_size": rng.choice((1, 4, 4, 16)),
        "max_total_tokens": rng.choice((128, 160, 256)),
        "chunked_prefill_size": rng.choice((8, 24, 24, 64)),
        "max_running_requests": rng.choice((3, 12, 12, 64)),
        "enable_prefix_caching": rng.random() < 0.8,
    }


def _prompts(seed: int) -> list[list[int]]:
    """Some that share beginnings, so that their pages are shared."""
    rng = random.Random(f"{seed}/prompts")
    stems = [Tiny.prompt(rng.randrange(8, 30), seed=rng.randrange(1 << 30)) for _ in range(3)]
    tails = [Tiny.prompt(rng.randrange(1, 12), seed=rng.randrange(1 << 30)) for _ in range(9)]
    return [*stems, *(stems[at % 3] + tail for at, tail in enumerate(tails))]
