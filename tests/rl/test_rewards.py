"""The scorer: every way in which a reward function can answer, or fail to."""

import asyncio
import functools
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tokenspeed_rl.errors import ConfigError, RequestError, TokenSpeedError
from tokenspeed_rl.rl.rewards import RewardError, RewardTimeoutError, Scorer
from tokenspeed_rl.rl.sample import Sample


def samples(count: int) -> list[Sample]:
    return [
        Sample(
            prompt={"answer": i}, prompt_ids=[1], group=i // 2, index=i % 2, output_ids=[2], logprobs=[-1.0]
        )
        for i in range(count)
    ]


def score(reward: Any, count: int = 4, **settings: Any) -> list[float | None]:
    return asyncio.run(Scorer(reward, **settings).score(samples(count)))


def by_answer(sample: Sample) -> float:
    """The sample's own number, later for earlier ones, so that order of arrival isn't order of samples."""
    time.sleep(0.02 * (4 - sample.prompt["answer"]))
    return sample.prompt["answer"]


async def by_answer_async(sample: Sample) -> float:
    await asyncio.sleep(0.02 * (4 - sample.prompt["answer"]))
    return sample.prompt["answer"]


class Verifier:
    """A callable object whose call is async."""

    name = "verifier"

    async def __call__(self, sample: Sample) -> float:
        return await by_answer_async(sample)


@pytest.mark.parametrize(
    "reward",
    [
        by_answer,
        by_answer_async,
        Verifier(),
        functools.partial(by_answer),
        functools.partial(by_answer_async),
        lambda sample: by_answer_async(sample),
    ],
    ids=[
        "function",
        "coroutine function",
        "async object",
        "partial",
        "async partial",
        "lambda of a coroutine",
    ],
)
def test_every_kind_of_reward_function(reward: Any) -> None:
    """Sync and async callables of all makes are scored in the order of the samples."""
    assert score(reward) == [0.0, 1.0, 2.0, 3.0]


def test_none_abstains_and_zero_counts() -> None:
    """H4: None is no reward, 0.0 and False are; numbers of other types become floats."""
    answers = [None, 0.0, False, True, 2, torch.tensor(0.5)]
    got = score(lambda sample: answers[sample.prompt["answer"]], 6)
    assert got == [None, 0.0, 0.0, 1.0, 2.0, 0.5]
    assert all(type(x) is float for x in got[1:])


def failing(sample: Sample) -> float:
    if sample.prompt["answer"] == 3:
        raise ZeroDivisionError("no digits")
    return 1.0


async def failing_async(sample: Sample) -> float:
    return failing(sample)


async def cancelling(sample: Sample) -> float:
    raise asyncio.CancelledError


def exhausted(sample: Sample) -> float:
    raise StopIteration("no more")


def exiting(sample: Sample) -> float:
    sys.exit(3)


async def exiting_async(sample: Sample) -> float:
    sys.exit(3)


@pytest.mark.parametrize(
    ("reward", "name", "where", "cause"),
    [
        (failing, "failing", "sample 1 of prompt 1", ZeroDivisionError),
        (failing_async, "failing_async", "sample 1 of prompt 1", ZeroDivisionError),
        (functools.partial(failing), "failing", "sample 1 of prompt 1", ZeroDivisionError),
        (cancelling, "cancelling", "sample 0 of prompt 0", asyncio.CancelledError),
        (exhausted, "exhausted", "sample 0 of prompt 0", RuntimeError),
        (exiting, "exiting", "sample 0 of prompt 0", RuntimeError),
        (exiting_async, "exiting_async", "sample 0 of prompt 0", RuntimeError),
    ],
)
def test_an_exception_surfaces_by_name(
    reward: Any, name: str, where: str, cause: type[BaseException]
) -> None:
    """H4: the reward's exception reaches the caller, chained, with the names of reward and sample."""
    with pytest.raises(RewardError, match=f"{name!r} failed on {where}") as caught:
        score(reward, concurrency=1)
    assert isinstance(caught.value.__cause__, cause)
    assert isinstance(caught.value, TokenSpeedError)


@pytest.mark.parametrize("answer", [float("nan"), float("inf"), "1.0", [1.0, 2.0], {}])
def test_what_is_no_finite_number_is_refused(answer: Any) -> None:
    """H4: a NaN, a string or a list is an error of the reward, by name, not a poisoned batch."""

    def strange(sample: Sample) -> Any:
        return answer

    with pytest.raises(RewardError, match="'strange' failed on sample 0 of prompt 0"):
        score(strange, 1)


def never(sample: Sample) -> float:
    threading.Event().wait(20)
    return 1.0


async def never_async(sample: Sample) -> float:
    await asyncio.Event().wait()
    return 1.0


async def stubborn(sample: Sample) -> float:
    """Swallows its first cancellation."""
    for _ in range(2):
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            continue
    return 1.0


@pytest.mark.parametrize("reward", [never, never_async, stubborn])
def test_a_reward_that_never_returns_times_out_by_name(reward: Callable[[Sample], Any]) -> None:
    """H4: a call that hangs, in a thread or in the event loop, is given up after the timeout, by name."""
    started = time.perf_counter()
    with pytest.raises(
        RewardTimeoutError, match=f"{reward.__name__!r} did not return for sample 0"
    ) as caught:
        score(reward, 2, timeout=0.2)
    assert time.perf_counter() - started < 5
    assert isinstance(caught.value, TimeoutError)


def test_a_timeout_of_the_rewards_own_is_its_exception() -> None:
    """H4: a TimeoutError raised inside the reward is not reported as ours."""

    def slow_server(sample: Sample) -> float:
        raise TimeoutError("the judge is busy")

    with pytest.raises(RewardError, match="the judge is busy") as caught:
        score(slow_server)
    assert not isinstance(caught.value, RewardTimeoutError)


def test_concurrency_is_bounded_and_the_clock_starts_with_the_call() -> None:
    """At most `concurrency` calls run; waiting for a turn doesn't count towards a sample's timeout."""
    running, most = 0, 0
    lock = threading.Lock()

    def counted(sample: Sample) -> float:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1
        return 1.0

    assert score(counted, 20, concurrency=3, timeout=0.3) == [1.0] * 20
    assert most == 3


def test_plain_functions_do_not_block_the_event_loop() -> None:
    """While a reward computes in its thread, the event loop serves others."""

    async def main() -> bool:
        release = threading.Event()
        scoring = asyncio.create_task(Scorer(lambda sample: float(release.wait(10))).score(samples(2)))
        await asyncio.sleep(0.05)
        release.set()
        return await scoring == [1.0, 1.0]

    assert asyncio.run(main())


def test_no_thread_stays_behind() -> None:
    """Threads end with the scoring they were started for, a stuck one with its call."""
    release = threading.Event()

    def scoring() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "reward-held"]

    def held(sample: Sample) -> float:
        release.wait(20)
        return 1.0

    with pytest.raises(RewardTimeoutError):
        score(held, timeout=0.1)
    stuck = scoring()
    assert stuck
    release.set()
    assert score(held) == [1.0] * 4
    for thread in {*stuck, *scoring()}:
        thread.join(5)
        assert not thread.is_alive()


def test_one_failure_or_a_cancelled_caller_stops_the_other_calls() -> None:
    """Nothing goes on scoring for nobody: calls under way are cancelled, the others never made."""
    started, cancelled = 0, 0

    async def watched(sample: Sample) -> float:
        nonlocal started, cancelled
        started += 1
        if sample.prompt["answer"] == 2:
            await asyncio.sleep(0.05)
            raise ValueError
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            cancelled += 1
            raise
        return 1.0

    async def failure() -> None:
        with pytest.raises(RewardError):
            await Scorer(watched, concurrency=3).score(samples(10))
        await asyncio.sleep(0)

    async def cancellation() -> None:
        task = asyncio.create_task(Scorer(watched, concurrency=2).score(samples(10)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)

    asyncio.run(failure())
    assert (started, cancelled) == (3, 2)
    asyncio.run(cancellation())
    assert (started, cancelled) == (5, 4)


def test_a_stuck_reward_does_not_keep_the_interpreter() -> None:
    """H4: after the timeout the process can exit, although the reward's thread never does."""
    program = """
        import asyncio, threading
        from tokenspeed_rl.rl.rewards import RewardTimeoutError, Scorer
        from tokenspeed_rl.rl.sample import Sample
        sample = Sample(prompt=None, prompt_ids=[1], group=0, index=0, output_ids=[], logprobs=[])
        try:
            asyncio.run(Scorer(lambda s: threading.Event().wait(), timeout=0.1).score([sample]))
        except RewardTimeoutError:
            raise SystemExit(7)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=60, capture_output=True)
    assert done.returncode == 7, done.stderr.decode()


def test_bad_settings_are_refused() -> None:
    """A reward that is no function, and bounds that are none, are refused when the scorer is made."""
    with pytest.raises(ConfigError, match="function of a sample"):
        Scorer("exact match")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="timeout must be positive"):
        Scorer(by_answer, timeout=0)
    with pytest.raises(RequestError, match="concurrency"):
        Scorer(by_answer, concurrency=0)
