"""Problems: nothing learnt from is ever asked in the test, and scores are the verifier's."""

import dataclasses

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.recipes.task import Task, TaskConfig

Policy = tuple[PreTrainedModel, PreTrainedTokenizerFast]
WORDS = TaskConfig(
    dataset="spell_backward",
    options={"min_word_len": 3, "max_word_len": 4},
    prompt="s:{word}=",
    wrong_answer="{word}",
    held_out=50,
)


def test_no_question_is_drawn_twice(policy: Policy) -> None:
    """Held-out, practice and demonstration problems have no question in common, whatever its case."""
    task = Task(WORDS, policy[1], seed=3)
    drawn = [*task.held_out]
    for split, count in (("practice", 700), ("demonstrations", 900), ("practice", 700), ("held_out", 100)):
        drawn += task.draw(split, count)
    words = [problem.entry["metadata"]["word"].lower() for problem in drawn]
    assert len(set(words)) == len(words) == 2450


def test_what_comes_first_does_not_change_the_test(policy: Policy) -> None:
    """A seed's held-out problems are the same however much is drawn for learning."""
    first, second = Task(WORDS, policy[1], seed=1), Task(WORDS, policy[1], seed=1)
    second.draw("demonstrations", 500)
    assert [p.question for p in first.held_out] == [p.question for p in second.held_out]


def test_neighbouring_seeds_differ(policy: Policy) -> None:
    """reasoning-gym's seeds 0 and 1 share all items but one; a recipe's seeds don't."""
    zero, one = (Task(WORDS, policy[1], seed=seed) for seed in (0, 1))
    shared = {p.question for p in zero.held_out} & {p.question for p in one.held_out}
    assert len(shared) < 5


def test_a_task_without_new_questions_says_so(policy: Policy) -> None:
    """A task with 200 distinct questions can't give 300: an error, not an endless search or a repeat."""
    sums = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    few = TaskConfig(dataset="chain_sum", options=sums, held_out=300)
    with pytest.raises(ConfigError, match="distinct questions"):
        Task(few, policy[1], seed=0)


def test_only_the_answer_is_right(task: Task) -> None:
    """1.0 for the answer, less for anything else, 0 for nothing."""
    for problem in task.held_out:
        word = problem.entry["metadata"]["word"]
        assert problem.answer == word[::-1]
        assert task.score(word[::-1], problem) == 1.0
        assert task.score(word[::-1] + "x", problem) < 1.0
        assert task.score(word[::-1][:-1], problem) < 1.0
        assert task.score("", problem) == 0.0
        assert problem.wrong_answer == word


def test_the_last_match_is_the_answer(policy: Policy) -> None:
    """A response is read as `answer` says; one without a match scores 0."""
    config = dataclasses.replace(WORDS, answer=r"answer: (\w+)")
    task = Task(config, policy[1], seed=0)
    problem = task.held_out[0]
    assert task.score(f"answer: wrong, no, answer: {problem.answer}!", problem) == 1.0
    assert task.score(f"answer: {problem.answer}, no, answer: wrong", problem) < 1.0
    assert task.score(problem.answer, problem) == 0.0


def test_prompts(policy: Policy) -> None:
    """A prompt is the template's text, or that text as a user's message in the tokenizer's chat template."""
    tokenizer = policy[1]
    turns = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    tokenizer.chat_template = turns + "{% if add_generation_prompt %}[a]{% endif %}"
    plain = Task(WORDS, tokenizer, seed=0).held_out[0]
    word = plain.entry["metadata"]["word"]
    assert tokenizer.decode(plain.input_ids) == f"s:{word}="
    chat = Task(dataclasses.replace(WORDS, chat=True, system="Spell."), tokenizer, seed=0).held_out[0]
    assert tokenizer.decode(chat.input_ids) == f"[system]Spell.[user]s:{word}=[a]"
