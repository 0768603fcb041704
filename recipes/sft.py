"""SFT: imitation of demonstrations, right and wrong ones alike. PPO's warm start alone, and PPO's control.

python recipes/sft.py                           # the warm start: accuracy before and after
python recipes/sft.py --config-name=control     # the warm start, then goes on imitating instead of PPO
python recipes/ppo.py model=pretrained model.path=runs/sft-tiny-seed0/checkpoint imitation.steps=0
"""

import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import MISSING, DictConfig

from tokenspeed_rl import Engine, EngineConfig
from tokenspeed_rl.display import Column
from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.recipes.accuracy import Accuracy, measure
from tokenspeed_rl.recipes.actor import Actor
from tokenspeed_rl.recipes.imitation import ImitationConfig, demonstrate, error_rate, imitate
from tokenspeed_rl.recipes.policy import ModelConfig
from tokenspeed_rl.recipes.run import Run
from tokenspeed_rl.recipes.schema import EvaluationConfig, RolloutConfig, register
from tokenspeed_rl.recipes.settings import launch, parse, setting
from tokenspeed_rl.recipes.task import Task, TaskConfig
from tokenspeed_rl.rl.seeds import derive

COLUMNS = (Column("step", "step", ".0f"), Column("loss", "loss"))
STEPS_PER_ROW = 25


@dataclass(slots=True, kw_only=True)
class SFTRecipe:
    """Everything `recipes/sft.py` can be told."""

    name: str = "sft-${model.name}-seed${seed}"
    folder: str = "runs/${name}"
    seed: int = setting(0, low=0)
    """Everything random follows from it; the same seed gives PPO's warm start, bit for bit."""
    model: ModelConfig = MISSING
    task: TaskConfig = MISSING
    imitation: ImitationConfig = field(default_factory=ImitationConfig)
    control_seconds: float = setting(0.0, low=0.0)
    """Above 0: accuracy counts from the end of `imitation.steps`, and imitation goes on for this long."""
    same_time_as: str | None = None
    """Folder of a finished PPO run: goes on for as long as that one learnt, instead of `control_seconds`."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Of these, what evaluation needs: length and temperature."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def validate(self) -> None:
        """Takes `control_seconds` from the run named by `same_time_as`."""
        if self.same_time_as is not None:
            try:
                summary = json.loads((Path(self.same_time_as) / "summary.json").read_text())
                self.control_seconds = summary["seconds_learning"]
            except (OSError, ValueError, KeyError) as error:
                raise ConfigError(
                    "same_time_as must be the folder of a finished PPO run", got=self.same_time_as
                ) from error


def train(cfg: SFTRecipe) -> dict[str, Any]:
    """Imitation, and accuracy before and after it. Returns the summary."""
    torch.manual_seed(derive(cfg.seed, "model"))
    model, tokenizer = cfg.model.build()
    task = Task(cfg.task, tokenizer, cfg.seed)
    actor = Actor(model, temperature=cfg.rollout.temperature)
    demonstrations = demonstrate(task, tokenizer, cfg.imitation, seed=cfg.seed)
    losses = enumerate(imitate(actor, demonstrations, cfg.imitation, seed=cfg.seed), start=1)
    with (
        Run(cfg, cfg.folder, columns=COLUMNS, curves=("loss",)) as run,
        Engine(model, tokenizer=tokenizer, config=cfg.engine) as engine,
    ):

        def accuracy() -> Accuracy:
            engine.weights_changed()
            params = cfg.rollout.sampling_params()
            return measure(engine, task, params, samples=cfg.evaluation.samples, seed=cfg.seed)

        if cfg.control_seconds:
            go_on(losses, run, steps=cfg.imitation.steps)
            before = accuracy()
            go_on(losses, run, seconds=cfg.control_seconds)
        else:
            before = accuracy()
            go_on(losses, run, steps=cfg.imitation.steps)
        after = accuracy()
        run.samples("after imitation", after.responses)
        run.save(model, tokenizer)
        facts = {"demonstrations": len(demonstrations), "wrong_demonstrations": error_rate(demonstrations)}
        return run.finish(before, after, facts=facts)


def go_on(
    losses: Iterator[tuple[int, float]], run: Run, *, steps: int | None = None, seconds: float = math.inf
) -> None:
    """Takes steps of imitation until there were `steps`, or `seconds` have passed."""
    bar = run.bar("imitation", steps)
    end = time.perf_counter() + seconds
    for step, loss in itertools.islice(losses, steps):
        bar.advance(f"loss {loss:.3f}")
        if step % STEPS_PER_ROW == 0:
            run.log(step, {"loss": loss})
        if time.perf_counter() > end:
            return


@hydra.main(version_base="1.3", config_path="../configs", config_name="sft")
def main(raw: DictConfig) -> None:
    train(parse(raw, SFTRecipe))


register("sft", SFTRecipe)

if __name__ == "__main__":
    launch(main)
