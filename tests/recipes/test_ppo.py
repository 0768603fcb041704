"""PPO: one step is the algorithm, and a run leaves what it says."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from tokenspeed_rl import Engine
from tokenspeed_rl.recipes import ppo as recipe
from tokenspeed_rl.recipes.actor import Actor
from tokenspeed_rl.recipes.ppo import PPO, PPORecipe
from tokenspeed_rl.recipes.run import Run
from tokenspeed_rl.recipes.task import Task
from tokenspeed_rl.rl.metrics import Metrics
from tokenspeed_rl.rl.rollout import RolloutLoop
from tokenspeed_rl.rl.trajectory import TrajectoryBatch

Policy = tuple[PreTrainedModel, PreTrainedTokenizerFast]
PPOMaker = Callable[..., PPORecipe]


def draw(policy: Policy, task: Task, cfg: PPORecipe, n: int = 12) -> TrajectoryBatch:
    """A batch of rollouts of the policy as it is."""
    model, tokenizer = policy
    with Engine(model, tokenizer=tokenizer) as engine:
        loop = RolloutLoop(
            engine.client,
            task.reward,
            sampling_params=cfg.rollout.sampling_params(),
            n=1,
            pad_token_id=tokenizer.pad_token_id,
            seed=0,
        )
        return engine.llm.run(loop.collect(task.draw("practice", n), step=1), timeout=60)


def test_first_ratio_is_one(policy: Policy, task: Task, small_ppo: PPOMaker) -> None:
    """H7: before the first update every ratio is 1, against the trainer's logprobs and the engine's."""
    cfg = small_ppo()
    algorithm = PPO(Actor(policy[0], temperature=1.0), cfg)
    batch = draw(policy, task, cfg)
    metrics = Metrics()
    metrics.update(algorithm.appraise(batch))
    _, first = algorithm.loss(batch, denominator=batch.num_actions)
    metrics.update(first)
    numbers = metrics.compute()
    assert numbers["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert numbers["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert 0.0 < numbers["logprob_gap_max"] < 1e-5
    assert numbers["kl"] == pytest.approx(0.0, abs=1e-6)


def test_micro_batches_add_up(policy: Policy, task: Task, small_ppo: PPOMaker) -> None:
    """H1: the weights after a step don't depend on how its minibatches were split."""
    cfg = small_ppo("trainer.lr=1e-3")
    batch = draw(policy, task, cfg)
    start = copy.deepcopy(policy[0])
    results = []
    for size in (6, 3, 2):
        cfg.trainer.micro_batch_size = size
        algorithm = PPO(Actor(copy.deepcopy(start), temperature=1.0), cfg)
        metrics = algorithm.learn(batch)
        results.append((metrics, [p.detach().clone() for p in algorithm.actor.parameters()]))
    for metrics, parameters in results[1:]:
        assert metrics == pytest.approx(results[0][0], abs=1e-4)
        for a, b in zip(parameters, results[0][1], strict=True):
            torch.testing.assert_close(a, b, rtol=0.0, atol=2e-4)
    assert any((a != b).any() for a, b in zip(results[0][1], start.parameters(), strict=False))


def test_the_reference_stays(policy: Policy, task: Task, small_ppo: PPOMaker) -> None:
    """KL is measured against the policy that PPO began with: 0 at first, more once the actor has moved."""
    cfg = small_ppo("trainer.lr=1e-2")
    algorithm = PPO(Actor(policy[0], temperature=1.0), cfg)
    before = copy.deepcopy(algorithm.reference.state_dict())
    batch = draw(policy, task, cfg)
    assert algorithm.learn(batch)["kl"] == pytest.approx(0.0, abs=1e-6)
    assert abs(algorithm.learn(batch)["kl"]) > 1e-3
    for name, value in algorithm.reference.state_dict().items():
        assert torch.equal(value, before[name])


def test_learning_raises_what_was_rewarded(policy: Policy, task: Task, small_ppo: PPOMaker) -> None:
    """Actions of samples that did better than expected become likelier, those of the others less likely."""
    cfg = small_ppo(
        "trainer.epochs=4", "trainer.lr=3e-3", "algorithm.kl_weight=0", "trainer.minibatch_size=12"
    )
    algorithm = PPO(Actor(policy[0], temperature=1.0), cfg)
    batch = draw(policy, task, cfg)
    batch.rewards[:] = torch.tensor([1.0, 0.0]).repeat(6)
    before = algorithm.actor.evaluate(batch, 12).logprobs.sum(1)
    algorithm.learn(batch)
    change = algorithm.actor.evaluate(batch, 12).logprobs.sum(1) - before
    assert change[::2].mean() > 0.0 > change[1::2].mean()


def test_nothing_to_learn_from(policy: Policy, task: Task, small_ppo: PPOMaker) -> None:
    """H3: a batch without a single action changes no weight and makes no NaN."""
    cfg = small_ppo()
    algorithm = PPO(Actor(policy[0], temperature=1.0), cfg)
    batch = draw(policy, task, cfg)
    batch.action_mask[:] = False
    before = copy.deepcopy(algorithm.actor.state_dict())
    metrics = algorithm.learn(batch)
    assert all(value == value for value in metrics.values())
    for name, value in algorithm.actor.state_dict().items():
        assert torch.equal(value, before[name])


@dataclass
class Finished:
    """A run of two steps, and what it held in its hands."""

    folder: Path
    cfg: PPORecipe
    summary: dict[str, Any]
    weights: dict[str, torch.Tensor]
    batches: list[TrajectoryBatch]


@pytest.fixture(scope="module")
def finished(small_ppo: PPOMaker, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("runs") / "ppo"
    run = Finished(folder, small_ppo(f"folder={folder}"), {}, {}, [])
    save, log_rollout = Run.save, Run.log_rollout

    def keep_weights(self: Run, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
        run.weights.update({name: value.clone() for name, value in model.state_dict().items()})
        save(self, model, tokenizer)

    def keep_batch(self: Run, step: int, batch: TrajectoryBatch, *args: Any, **kwargs: Any) -> None:
        run.batches.append(batch)
        log_rollout(self, step, batch, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "save", keep_weights)
        patch.setattr(Run, "log_rollout", keep_batch)
        run.summary.update(recipe.train(run.cfg))
    return run


def test_a_run_leaves_its_files(finished: Finished, composer: Callable[..., Any]) -> None:
    """The folder holds the resolved settings, metrics, events, curve, samples, summary and a checkpoint."""
    folder, cfg, summary = finished.folder, finished.cfg, finished.summary
    names = {path.name.split(".17")[0] for path in folder.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "curve.png", "samples.md", "summary.json", "checkpoint"} <= names
    assert "${" not in (folder / "config.yaml").read_text()
    assert f"folder: {cfg.folder}" in (folder / "config.yaml").read_text()
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "summary.json").read_text()) == summary
    text = (folder / "samples.md").read_text()
    assert text.index("before PPO") < text.index("after PPO")
    events = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in events.Scalars("reward")] == [1, 2]


def test_every_step_is_measured(finished: Finished) -> None:
    """H7: reward, KL, entropy, clip fraction, speed, seconds, and the logprob gap from step 1."""
    rows = [json.loads(line) for line in (finished.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    shown = {column.metric for column in recipe.COLUMNS}
    for row in rows:
        assert shown <= row.keys()
        assert all(isinstance(value, int | float) for value in row.values())
        assert row["seconds_generate"] > 0.0 and row["seconds_train"] > 0.0
        assert row["logprob_gap_max"] < 1e-4
        assert 0.0 <= row["reward"] <= 1.0
    assert rows[0]["logprob_gap_max"] < 1e-5


def test_the_engine_hears_of_every_update(finished: Finished) -> None:
    """D3: a step's samples are drawn under one version of the weights, the next step's under a later one."""
    first, second = (
        {span.version for spans in batch.versions for span in spans} for batch in finished.batches
    )
    assert len(first) == len(second) == 1
    assert first != second


def test_the_summary(finished: Finished) -> None:
    """It holds both accuracies before and after, the demonstrations' error rate, and what time went to."""
    cfg, summary = finished.cfg, finished.summary
    for kind in ("greedy_accuracy", "sampled_accuracy"):
        before, after = summary[kind]
        assert 0.0 <= before <= 1.0 and 0.0 <= after <= 1.0
    assert summary["demonstrations"] == 64
    assert summary["wrong_demonstrations"] == pytest.approx(cfg.imitation.wrong, abs=0.05)
    assert summary["tokens_per_second"] > 0.0
    assert 0.0 < summary["share_of_time_generating"] < 1.0


def test_the_checkpoint_is_the_policy(finished: Finished) -> None:
    """transformers loads the folder, with the weights the run ended with, bit for bit, and the tokenizer."""
    folder, weights = finished.folder, finished.weights
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint")
    state = model.state_dict()
    assert state.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(state[name], value)
    tokenizer = AutoTokenizer.from_pretrained(folder / "checkpoint")
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.decode(tokenizer("s:abc=")["input_ids"]) == "s:abc="


def test_the_same_seed_gives_the_same_run(finished: Finished, small_ppo: PPOMaker, tmp_path: Path) -> None:
    """Everything random follows from the seed: a second run's rewards and accuracies are the first one's."""
    folder, summary = finished.folder, finished.summary
    again = recipe.train(small_ppo(f"folder={tmp_path / 'again'}"))
    rewards = [
        [json.loads(line)["reward"] for line in (path / "metrics.jsonl").read_text().splitlines()]
        for path in (folder, tmp_path / "again")
    ]
    assert rewards[0] == rewards[1]
    assert again["sampled_accuracy"] == summary["sampled_accuracy"]
