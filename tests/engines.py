"""Fixtures: engines that end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.step_gate import StepGate
from tests.tiny import Tiny
from tokenspeed_rl import Engine


@pytest.fixture(scope="session")
def tiny() -> type[Tiny]:
    return Tiny


@pytest.fixture
def step_gate() -> type[StepGate]:
    """`with step_gate(engine) as gate:` holds the loop before its next step."""
    return StepGate


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    """`Engine(model, **options)` on the CPU with a small KV cache; all are shut down after the test."""
    made: list[Engine] = []

    def make(model: Any, **options: Any) -> Engine:
        made.append(Engine(model, **{"device": "cpu", "max_total_tokens": 4096, **options}))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """One model for all tests of a file that don't write its weights."""
    return Tiny.model()


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel) -> Iterator[Engine]:
    """One engine that shares `model`, with a tokenizer, for all tests of a file that don't break it."""
    with Engine(model, tokenizer=Tiny.tokenizer(), max_total_tokens=4096) as made:
        yield made


@pytest.fixture(scope="module")
def counting() -> PreTrainedModel:
    """A model whose greedy output after token t is t + 1, t + 2 ... (mod 256); nobody writes its weights."""
    return Tiny.successor()


@pytest.fixture(scope="module")
def counter(counting: PreTrainedModel) -> Iterator[Engine]:
    """An engine of `counting` with a tokenizer whose token b is the byte b, for tests that don't break it."""
    with Engine(counting, tokenizer=Tiny.tokenizer(), max_total_tokens=1024) as made:
        yield made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for callers that block."""
    with ThreadPoolExecutor(12) as made:
        yield made
