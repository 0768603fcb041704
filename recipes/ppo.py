"""PPO: a policy with a value head, an engine that reads its weights, rewards from a verifier or a model.

python recipes/ppo.py                     # a tiny policy learns to spell backwards in about two minutes
python recipes/ppo.py model=smollm2       # SmolLM2-135M-Instruct
python recipes/ppo.py seed=1 trainer.lr=3e-4 name=try
python recipes/ppo.py reward=model reward.path=DIR   # a reward model, in a second engine
"""

import copy
import time
from dataclasses import dataclass, field
from typing import Any, cast

import hydra
import torch
from omegaconf import MISSING, DictConfig
from torch import Tensor

from tokenspeed_rl import Engine, EngineConfig
from tokenspeed_rl.display import Column
from tokenspeed_rl.recipes.accuracy import measure
from tokenspeed_rl.recipes.actor import Actor
from tokenspeed_rl.recipes.imitation import ImitationConfig, warm_start
from tokenspeed_rl.recipes.memory import MemoryUse
from tokenspeed_rl.recipes.policy import ModelConfig
from tokenspeed_rl.recipes.reward import RewardConfig
from tokenspeed_rl.recipes.run import Run, drawn
from tokenspeed_rl.recipes.schema import EvaluationConfig, RolloutConfig, TrainerConfig, register
from tokenspeed_rl.recipes.settings import launch, parse, setting
from tokenspeed_rl.recipes.task import Task, TaskConfig
from tokenspeed_rl.rl.advantages import gae, terminal_rewards, whiten
from tokenspeed_rl.rl.logprobs import logprob_gap
from tokenspeed_rl.rl.losses import KLKind, kl_estimate, policy_loss, value_loss
from tokenspeed_rl.rl.masked import masked_mean
from tokenspeed_rl.rl.metrics import Metrics, MetricTensors, mean_of
from tokenspeed_rl.rl.rollout import RolloutLoop
from tokenspeed_rl.rl.seeds import derive
from tokenspeed_rl.rl.trajectory import TrajectoryBatch


@dataclass(slots=True, kw_only=True)
class PPOConfig:
    """The algorithm (Schulman et al. 2017)."""

    gamma: float = setting(1.0, low=0.0, high=1.0)
    lam: float = setting(0.95, low=0.0, high=1.0)
    """GAE's trade of bias against variance."""
    clip_low: float = setting(0.2, low=0.0, high=0.999)
    """Ratios below 1 - clip_low give no gradient; above 1 + clip_high neither."""
    clip_high: float = setting(0.2, low=0.0)
    value_clip: float | None = setting(0.2, above=0.0)
    """How far a value may move from its old one in one update; null: as far as it likes."""
    value_weight: float = setting(0.1, low=0.0)
    entropy_weight: float = setting(0.0, low=0.0)
    kl_weight: float = setting(0.01, low=0.0)
    """What a nat away from the reference policy costs, per token, in reward."""
    kl_kind: str = setting("k1", choices=("k1", "k2", "k3"))
    """Estimator of that distance in the reward."""


@dataclass(slots=True, kw_only=True)
class PPORecipe:
    """Everything `recipes/ppo.py` can be told."""

    name: str = "ppo-${model.name}-seed${seed}"
    folder: str = "runs/${name}"
    seed: int = setting(0, low=0)
    """Everything random follows from it."""
    model: ModelConfig = MISSING
    task: TaskConfig = MISSING
    reward: RewardConfig = MISSING
    imitation: ImitationConfig = field(default_factory=ImitationConfig)
    """The warm start."""
    algorithm: PPOConfig = field(default_factory=PPOConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)


COLUMNS = (
    Column("step", "step", ".0f"),
    Column("reward", "reward"),
    Column("right", "right", ".1%"),
    Column("KL", "kl"),
    Column("entropy", "entropy"),
    Column("clip", "clip_fraction"),
    Column("logprob gap", "logprob_gap_max", ".1e"),
    Column("tok/s", "tokens_per_second", ",.0f"),
    Column("generate s", "seconds_generate", ".2f"),
    Column("score s", "seconds_score", ".2f"),
    Column("train s", "seconds_train", ".2f"),
)
CURVES = ("reward", "right", "kl", "entropy", "clip_fraction", "logprob_gap_max")


class PPO:
    """The algorithm: what a batch of rollouts does to the actor."""

    def __init__(self, actor: Actor, cfg: PPORecipe) -> None:
        """The actor as it is now becomes the reference policy."""
        self.actor, self.algorithm, self.trainer = actor, cfg.algorithm, cfg.trainer
        self.reference = copy.deepcopy(actor).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            actor.parameters(), lr=cfg.trainer.lr, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, cfg.trainer.lr_factor)
        self.shuffle = torch.Generator().manual_seed(derive(cfg.seed, "minibatches"))

    def learn(self, batch: TrajectoryBatch) -> dict[str, float]:
        """Some epochs of clipped steps over one batch. Returns its metrics."""
        metrics = Metrics()
        metrics.update(self.appraise(batch))
        for _ in range(self.trainer.epochs):
            for minibatch in batch.minibatches(self.trainer.minibatch_size, self.shuffle):
                self.optimizer.zero_grad()
                for part in minibatch.minibatches(self.trainer.micro_batch_size):
                    loss, part_metrics = self.loss(part, denominator=minibatch.num_actions)
                    loss.backward()
                    metrics.update(part_metrics)
                torch.nn.utils.clip_grad_norm_(self.actor.parameters(), self.trainer.max_grad_norm)
                self.optimizer.step()
        self.schedule.step()
        return metrics.compute()

    @torch.no_grad()
    def appraise(self, batch: TrajectoryBatch) -> MetricTensors:
        """Adds to `batch.extra` what updates are measured against: logprobs, values, advantages, returns."""
        mask = batch.action_mask
        old = self.actor.evaluate(batch, self.trainer.micro_batch_size)
        reference = self.reference.evaluate(batch, self.trainer.micro_batch_size)
        kl = kl_estimate(old.logprobs, reference.logprobs, cast(KLKind, self.algorithm.kl_kind))
        rewards = terminal_rewards(batch.rewards, mask) - self.algorithm.kl_weight * kl
        advantages, returns = gae(
            rewards, old.values, mask, gamma=self.algorithm.gamma, lam=self.algorithm.lam
        )
        batch.extra.update(
            logprobs=old.logprobs, values=old.values, advantages=whiten(advantages, mask), returns=returns
        )
        gap = logprob_gap(old.logprobs, batch.logprobs, mask)
        return {"kl": mean_of(kl, mask), "entropy": mean_of(old.entropies, mask), **gap}

    def loss(self, part: TrajectoryBatch, *, denominator: int) -> tuple[Tensor, MetricTensors]:
        """The part's share of its minibatch's loss; `denominator`: actions of the whole minibatch."""
        ppo, old, mask = self.algorithm, part.extra, part.action_mask
        new = self.actor(part.input_ids, mask)
        policy, policy_metrics = policy_loss(
            new.logprobs,
            old["logprobs"],
            old["advantages"],
            mask,
            clip_low=ppo.clip_low,
            clip_high=ppo.clip_high,
            denominator=denominator,
        )
        value, value_metrics = value_loss(
            new.values, old["values"], old["returns"], mask, clip=ppo.value_clip, denominator=denominator
        )
        entropy = masked_mean(new.entropies, mask, denominator)
        loss = policy + ppo.value_weight * value - ppo.entropy_weight * entropy
        return loss, policy_metrics | value_metrics


def train(cfg: PPORecipe) -> dict[str, Any]:
    """Warm start, PPO, and accuracy before and after it. Returns the summary."""
    torch.manual_seed(derive(cfg.seed, "model"))
    model, tokenizer = cfg.model.build()
    task = Task(cfg.task, tokenizer, cfg.seed)
    actor = Actor(model, temperature=cfg.rollout.temperature)
    params = cfg.rollout.sampling_params()
    memory = MemoryUse()
    with Run(cfg, cfg.folder, columns=COLUMNS, curves=CURVES) as run:
        facts = warm_start(actor, task, tokenizer, cfg.imitation, run, seed=cfg.seed)
        with (
            Engine(model, tokenizer=tokenizer, config=cfg.engine) as engine,
            cfg.reward.open(task, tokenizer) as source,
        ):
            ppo = PPO(actor, cfg)
            engine.watch(ppo.optimizer)  # it reads the actor's own weights, and only has to hear of changes
            engine.release_memory_occupation()  # and sleeps but where it generates
            rollouts = RolloutLoop(
                engine.client,
                source.reward,
                sampling_params=params,
                n=cfg.rollout.samples,
                pad_token_id=tokenizer.pad_token_id,
                seed=derive(cfg.seed, "rollouts"),
                mask_truncated=cfg.rollout.mask_truncated,
                reward_concurrency=source.concurrency,
            )
            with memory.generating(engine.resident()):
                before = measure(engine, task, params, samples=cfg.evaluation.samples, seed=cfg.seed)
            run.samples("before PPO", before.responses)
            bar = run.bar("PPO", cfg.trainer.steps)
            for step in range(1, cfg.trainer.steps + 1):
                problems = task.draw("practice", cfg.rollout.prompts)
                with memory.generating(engine.resident()), source.resident():
                    batch = engine.llm.run(rollouts.collect(problems, step=step))
                started = time.perf_counter()
                with memory.phase("training"):
                    metrics = ppo.learn(batch) | source.metrics(batch.samples)
                run.log_rollout(step, batch, metrics, train=time.perf_counter() - started)
                if step % cfg.evaluation.show_every == 0:
                    run.samples(f"step {step}", drawn(batch))
                bar.advance()
            with memory.generating(engine.resident()):
                after = measure(engine, task, params, samples=cfg.evaluation.samples, seed=cfg.seed)
            run.samples("after PPO", after.responses)
        run.save(model, tokenizer)
        return run.finish(before, after, facts={**facts, **memory.facts()})


@hydra.main(version_base="1.3", config_path="../configs", config_name="ppo")
def main(raw: DictConfig) -> None:
    train(parse(raw, PPORecipe))


register("ppo", PPORecipe, algorithm=PPOConfig)

if __name__ == "__main__":
    launch(main)
