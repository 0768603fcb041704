"""Imitation: demonstrations of the stated quality, and a loss that falls."""

import dataclasses
from itertools import islice

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.recipes.actor import Actor
from tokenspeed_rl.recipes.imitation import ImitationConfig, demonstrate, error_rate, imitate
from tokenspeed_rl.recipes.task import Task

Policy = tuple[PreTrainedModel, PreTrainedTokenizerFast]
CONFIG = ImitationConfig(demonstrations=200, batch_size=50, lr=3e-3, warmup_steps=2)


@pytest.mark.parametrize("wrong", [0.0, 0.6, 1.0])
def test_the_error_rate_is_as_stated(task: Task, policy: Policy, wrong: float) -> None:
    """The share of wrong demonstrations is what the settings say, by the verifier's own count."""
    batch = demonstrate(task, policy[1], dataclasses.replace(CONFIG, wrong=wrong), seed=0)
    palindromes = sum(s.prompt.answer.lower() == s.prompt.wrong_answer.lower() for s in batch.samples)
    assert len(batch) == 200
    assert error_rate(batch) == pytest.approx(wrong, abs=(palindromes + 0.5) / 200)
    assert error_rate(batch) <= wrong + 1e-6


def test_a_demonstration_is_prompt_answer_and_end(task: Task, policy: Policy) -> None:
    """What is learnt are the answer's tokens and the end; the prompt isn't."""
    tokenizer = policy[1]
    batch = demonstrate(task, tokenizer, dataclasses.replace(CONFIG, wrong=0.5), seed=0)
    for row, sample in enumerate(batch.samples):
        learnt = batch.input_ids[row][batch.action_mask[row]].tolist()
        assert learnt[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(learnt[:-1]) in (sample.prompt.answer, sample.prompt.wrong_answer)
        before = batch.input_ids[row][batch.attention_mask[row] & ~batch.action_mask[row]].tolist()
        assert before == sample.prompt.input_ids


def test_the_loss_falls_and_repeats(task: Task, policy: Policy) -> None:
    """Imitation learns, and the same seed gives the same losses bit for bit."""
    batch = demonstrate(task, policy[1], CONFIG, seed=0)
    start = {name: value.clone() for name, value in policy[0].state_dict().items()}

    def losses(seed: int) -> list[float]:
        policy[0].load_state_dict(start)
        return list(islice(imitate(Actor(policy[0], temperature=1.0), batch, CONFIG, seed=seed), 12))

    first = losses(0)
    assert first[-1] < 0.8 * first[0]
    assert losses(0) == first
    assert losses(1) != first


def test_a_task_without_wrong_answers_has_no_wrong_demonstrations(task: Task, policy: Policy) -> None:
    """`wrong` above 0 is refused where the task can't be got wrong on purpose; 0 is fine."""
    plain = Task(dataclasses.replace(task.config, wrong_answer=None), policy[1], seed=0)
    with pytest.raises(ConfigError, match="wrong_answer"):
        demonstrate(plain, policy[1], CONFIG, seed=0)
    batch = demonstrate(plain, policy[1], dataclasses.replace(CONFIG, wrong=0.0), seed=0)
    assert torch.all(batch.rewards == 1.0)
