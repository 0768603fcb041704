"""Rewards: how samples are scored, with every failure named."""

import asyncio
import contextlib
import contextvars
import functools
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from queue import SimpleQueue
from typing import Any

from tokenspeed_rl.errors import ConfigError, TokenSpeedError
from tokenspeed_rl.rl.sample import Sample
from tokenspeed_rl.sampling_params import check_integer

Reward = Callable[[Sample], float | None] | Callable[[Sample], Awaitable[float | None]]
"""Scores one sample; None abstains. A plain function runs in a thread, an async one in the event loop."""


_Outcome = tuple[Any, BaseException | None]


class RewardError(TokenSpeedError):
    """A reward function raised (its exception is the cause), or returned what is no finite number."""


class RewardTimeoutError(RewardError, TimeoutError):
    """A reward function didn't return in time."""


class Scorer:
    """Applies one reward function to samples, at most `concurrency` at a time, each within `timeout` seconds.

    The time counts from the start of the call. A plain function that goes on after its time does so in a
    daemon thread, its result unused, and holds up neither the caller nor the interpreter's exit.
    """

    def __init__(self, reward: Reward, *, timeout: float = 60.0, concurrency: int = 16) -> None:
        if not callable(reward):
            raise ConfigError("reward must be a function of a sample", got=reward, fix="Pass a callable.")
        if not timeout > 0.0:
            raise ConfigError("the reward's timeout must be positive", got=timeout, fix="Pass seconds.")
        self.reward = reward
        self.timeout = timeout
        self.concurrency = check_integer("reward concurrency", concurrency, low=1)
        self.name = _name_of(reward)

    async def score(self, samples: Sequence[Sample]) -> list[float | None]:
        """One number per sample, None where the reward abstained.

        Raises `RewardError` or `RewardTimeoutError` at the first failure, naming reward and sample; the calls
        under way are then cancelled, as they are when the caller is.
        """
        rewards: list[float | None] = [None] * len(samples)
        left = iter(enumerate(samples))

        async def work() -> None:
            with contextlib.ExitStack() as stack:
                call: Callable[[Sample], Any] = self.reward
                if not _is_async(self.reward):
                    call = stack.enter_context(contextlib.closing(_Thread(self.reward)))
                for at, sample in left:
                    rewards[at] = await self._call(call, sample)

        workers = [asyncio.create_task(work()) for _ in range(min(self.concurrency, len(samples)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return rewards

    async def _call(self, call: Callable[[Sample], Any], sample: Sample) -> float | None:
        task = asyncio.create_task(_invoke(call, sample))
        try:
            # Not wait_for or timeout(): those wait until the task has accepted its cancellation.
            done, _ = await asyncio.wait({task}, timeout=self.timeout)
        finally:
            task.cancel()
        if not done:
            raise RewardTimeoutError(
                f"reward {self.name!r} did not return for {sample.name} within {self.timeout:g} s",
                fix="Raise the reward's timeout, or bound the work inside it.",
            )
        try:
            return _number(task.result())
        except (Exception, asyncio.CancelledError) as error:
            raise RewardError(
                f"reward {self.name!r} failed on {sample.name}: {type(error).__name__}: {error}",
                fix="Return a finite number, or None to abstain.",
            ) from error


async def _invoke(call: Callable[[Sample], Any], sample: Sample) -> Any:
    try:
        value = await call(sample)
        return await value if inspect.isawaitable(value) else value
    except SystemExit as error:  # out of a task it would end the event loop
        raise RuntimeError("it called sys.exit") from error


class _Thread:
    """Calls a plain reward function in a daemon thread of its own, one sample at a time.

    Not a thread of an executor: the interpreter joins those at exit, and a stuck one would hold it for ever.
    """

    def __init__(self, reward: Reward) -> None:
        self._reward = reward
        self._inbox: SimpleQueue[tuple[Sample, asyncio.Future[_Outcome]] | None] = SimpleQueue()
        run = functools.partial(contextvars.copy_context().run, self._serve, asyncio.get_running_loop())
        threading.Thread(target=run, name=f"reward-{_name_of(reward)}", daemon=True).start()

    async def __call__(self, sample: Sample) -> Any:
        outcome: asyncio.Future[_Outcome] = asyncio.get_running_loop().create_future()
        self._inbox.put((sample, outcome))
        value, error = await outcome
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """The thread ends after what it is at."""
        self._inbox.put(None)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        while (job := self._inbox.get()) is not None:
            sample, outcome = job
            try:
                result: _Outcome = self._reward(sample), None
            except BaseException as error:
                result = None, error
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_deliver, outcome, result)


def _deliver(outcome: asyncio.Future[_Outcome], result: _Outcome) -> None:
    if not outcome.done():
        outcome.set_result(result)


def _number(value: Any) -> float | None:
    if value is None:
        return None
    number = math.nan if isinstance(value, str | bytes) else float(value)
    if not math.isfinite(number):
        raise ValueError(f"it returned {value!r}")
    return number


def _name_of(reward: Reward) -> str:
    function = reward.func if isinstance(reward, functools.partial) else reward
    return str(getattr(reward, "name", None) or getattr(function, "__name__", type(function).__name__))


def _is_async(reward: Reward) -> bool:
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)
