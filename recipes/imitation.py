"""Learning from demonstrations, right and wrong ones alike: the warm start of PPO, and its control."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.recipes.actor import Actor
from tokenspeed_rl.recipes.run import Run
from tokenspeed_rl.recipes.settings import setting
from tokenspeed_rl.recipes.task import Task
from tokenspeed_rl.rl.sample import Sample
from tokenspeed_rl.rl.seeds import derive
from tokenspeed_rl.rl.trajectory import TrajectoryBatch


@dataclass(slots=True, kw_only=True)
class ImitationConfig:
    """Supervised steps on demonstrations of mixed quality."""

    steps: int = setting(400, low=0)
    """0: no imitation."""
    demonstrations: int = setting(4000, low=1)
    """Problems with one demonstration each, none of them in the other sets."""
    wrong: float = setting(0.6, low=0.0, high=1.0)
    """Share of demonstrations that give the task's `wrong_answer`."""
    batch_size: int = setting(128, low=1)
    lr: float = setting(1e-3, above=0.0)
    warmup_steps: int = setting(20, low=1)
    """Steps over which the learning rate rises to `lr`, where it stays."""
    max_grad_norm: float = setting(1.0, above=0.0)


def demonstrate(task: Task, tokenizer: Any, config: ImitationConfig, *, seed: int) -> TrajectoryBatch:
    """One demonstration each of `config.demonstrations` problems, with the verifier's score as its reward."""
    problems = task.draw("demonstrations", config.demonstrations)
    wrong = round(config.wrong * len(problems))
    if wrong and problems[0].wrong_answer is None:
        raise ConfigError(
            "imitation.wrong needs the task's wrong_answer", got=config.wrong, fix="Set task.wrong_answer."
        )
    is_wrong = [True] * wrong + [False] * (len(problems) - wrong)
    random.Random(derive(seed, "demonstrations")).shuffle(is_wrong)
    samples = []
    for group, (problem, misleads) in enumerate(zip(problems, is_wrong, strict=True)):
        text = problem.wrong_answer if misleads and problem.wrong_answer is not None else problem.answer
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        samples.append(
            Sample(
                prompt=problem,
                prompt_ids=problem.input_ids,
                group=group,
                index=0,
                output_ids=ids,
                logprobs=[0.0] * len(ids),
                text=text,
            )
        )
    scores = [task.score(sample.text, sample.prompt) for sample in samples]
    return TrajectoryBatch.from_samples(samples, scores, pad_token_id=tokenizer.pad_token_id)


def error_rate(demonstrations: TrajectoryBatch) -> float:
    """Share of demonstrations that the verifier doesn't call right."""
    return (demonstrations.rewards < 1.0).float().mean().item()


def imitate(
    actor: Actor, demonstrations: TrajectoryBatch, config: ImitationConfig, *, seed: int
) -> Iterator[float]:
    """Trains the actor's model on all demonstrations, over and over, for as long as the caller iterates.

    Yields the loss of each step, in nats per token, after the step. What is learnt is their mix of
    right and wrong.
    """
    parameters = list(actor.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=config.lr, weight_decay=0.0)
    shuffle = torch.Generator().manual_seed(derive(seed, "imitation"))
    epochs = (demonstrations.minibatches(config.batch_size, shuffle) for _ in itertools.count())
    for step, batch in enumerate(itertools.chain.from_iterable(epochs), start=1):
        optimizer.param_groups[0]["lr"] = config.lr * min(1.0, step / config.warmup_steps)
        loss = -actor(batch.input_ids, batch.action_mask).logprobs.sum() / batch.num_actions
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
        optimizer.step()
        yield loss.item()


def warm_start(
    actor: Actor, task: Task, tokenizer: Any, config: ImitationConfig, run: Run, *, seed: int
) -> dict[str, float | int]:
    """`config.steps` steps of imitation. Returns what is to be said about the demonstrations."""
    if not config.steps:
        return {}
    demonstrations = demonstrate(task, tokenizer, config, seed=seed)
    bar = run.bar("warm start", config.steps)
    for _, loss in zip(range(config.steps), imitate(actor, demonstrations, config, seed=seed), strict=False):
        bar.advance(f"loss {loss:.3f}")
    return {"demonstrations": len(demonstrations), "wrong_demonstrations": error_rate(demonstrations)}
