"""Weight updates that fail half-way: taken back, or invalid until a complete one, and always said which."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lifecycle.guarded import (
    HOW,
    PROMPT,
    WHOLE,
    Looks,
    looks,
    parcel,
    update,
    weights_of,
)
from tests.lifecycle.kept import NORM, W0, W1, Kept, breaks
from tests.lifecycle.rollouts import EXACT, WAIT, ask, span_gap, take
from tests.step_gate import StepGate
from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.core import weight_sync
from tokenspeed_rl.errors import (
    EngineShutdownError,
    EngineTimeoutError,
    RequestError,
    WeightUpdateError,
)
from tokenspeed_rl.requests import UpdateWeightsFromTensorReqInput

NAMES = list(weights_of(W0))


Named = list[tuple[str, Tensor]]


class Broken(Exception):
    """What a caller's iterator raises."""


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    with Engine(W0.config, page_size=4, max_total_tokens=4096) as engine:
        yield Kept(engine)


def broke() -> None:
    raise Broken("the trainer's side fell over")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("after", [0, 1, len(NAMES) // 2, len(NAMES) - 1])
def test_the_iterator_raises(kept: Kept, after: int, atomic: bool, how: str) -> None:
    """E14: at any point. Before the first tensor nothing changes; then the weights are invalid until a
    complete update, or with `atomic` old weights and version are back bit for bit. The caller's exception is
    chained, and the message says what holds."""
    error = update(kept.engine, how, "iterator", breaks(after, broke), atomic=atomic, weight_version="lost")
    assert type(error) is WeightUpdateError and type(error.__cause__) is Broken
    assert "Broken: the trainer's side fell over" in str(error)
    if after == 0:
        assert "nothing was written" in str(error)
        kept.check()
    elif atomic:
        assert "what it had overwritten was put back" in str(error)
        kept.check()
    else:
        assert "the weights are invalid until a complete update" in str(error)
        kept.mend()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit])
@pytest.mark.parametrize("atomic", [False, True])
def test_the_iterator_is_interrupted(kept: Kept, atomic: bool, kind: type[BaseException]) -> None:
    """E14: what is no Exception passes as it is, but for the end of a generator, which stays within the
    update; it leaves the same behind."""

    def interrupt() -> None:
        raise kind

    with pytest.raises(WeightUpdateError if kind is GeneratorExit else kind) as error:
        kept.engine.update_weights_from_tensor(breaks(3, interrupt), atomic=atomic)
    assert kind in (type(error.value), type(error.value.__cause__))
    if atomic:
        kept.check()
    else:
        kept.mend()


@pytest.mark.parametrize("item", [None, "model.norm.weight", ("a",), (NORM, 3), (3, torch.ones(2))], ids=str)
@pytest.mark.parametrize("atomic", [False, True])
def test_what_is_no_pair(kept: Kept, item: Any, atomic: bool) -> None:
    """E14: an item in the middle that is no (name, tensor) fails as any other wrong item; in a list nothing
    is written at all."""
    pairs: list[Any] = list(weights_of(W1).items())
    pairs.insert(5, item)
    with pytest.raises(WeightUpdateError, match="item 5"):
        kept.engine.update_weights_from_tensor(pairs)
    kept.check()
    with pytest.raises(WeightUpdateError, match="item 5"):
        kept.engine.update_weights_from_tensor(iter(pairs), atomic=atomic)
    if atomic:
        kept.check()
    else:
        kept.mend()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("atomic", [False, True])
def test_the_timeout(kept: Kept, monkeypatch: Any, atomic: bool, how: str) -> None:
    """E14: an iterator that takes longer than it may: EngineTimeoutError, and what holds is said."""
    clock = [0.0]
    monkeypatch.setattr(weight_sync, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def take_long() -> None:
        clock[0] = 61.0

    error = update(kept.engine, how, "iterator", breaks(4, take_long), atomic=atomic, timeout=60.0)
    assert type(error) is EngineTimeoutError and "60.0 s" in str(error)
    if atomic:
        assert "put back" in str(error)
        kept.check()
    else:
        assert "invalid until" in str(error)
        kept.mend()
    for bad in (0, -1.0, "soon"):
        assert isinstance(update(kept.engine, how, "mapping", weights_of(W1), timeout=bad), RequestError)
    kept.check()


@pytest.mark.parametrize("after", [0, 4])
@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("times", [1, 3])
def test_cancellation(kept: Kept, times: int, atomic: bool, after: int) -> None:
    """E14, contract 2: the task that awaits an update is cancelled, perhaps again and again, while the loop
    is busy with a long step: the caller gets its CancelledError, and the engine is as after any failure, with
    its place for the next update free."""
    engine = kept.engine
    holding, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        engine.client._core.loop.call(lambda: holding.set() or go_on.wait(WAIT))
        assert holding.wait(WAIT)

    async def main() -> None:
        reached = asyncio.Event()

        def act() -> None:
            hold()
            reached.set()

        obj = UpdateWeightsFromTensorReqInput(named_tensors=breaks(after, act), atomic=atomic)
        task = asyncio.ensure_future(engine.client.update_weights_from_tensor(obj))
        await reached.wait()
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    engine.flush_cache()
    assert Tiny.state(engine)["updating"] is False
    if after == 0 or atomic:
        kept.check()
    else:
        kept.mend()


@pytest.mark.parametrize("mode", ["abort", "wait", "keep", "retract"])
def test_a_failure_under_every_pause(kept: Kept, mode: str) -> None:
    """B6, E14: a failed update of a paused engine leaves it paused, as it was; a request that was frozen in
    the middle goes on exactly once the weights are complete again."""
    engine = kept.engine
    with StepGate(engine) as gate:
        live = ask(engine, PROMPT, max_new_tokens=8)
        gate.step(3)
        gate.wait()
        gate.open()
        engine.pause(mode)
    for atomic in (True, False):
        error = update(engine, "engine", "iterator", breaks(3, broke), atomic=atomic)
        assert isinstance(error, WeightUpdateError) and Tiny.state(engine)["admission"] == mode
    engine.update_weights_from_tensor(weights_of(W0), weight_version="W0")
    engine.resume()
    result = take(engine, live)
    if mode in ("keep", "retract"):
        assert len(result["output_ids"]) == 8
    assert span_gap({"W0": W0}, PROMPT, result) < EXACT
    kept.reset()
    kept.check()


@pytest.mark.parametrize("atomic", [False, True])
def test_shutdown_in_the_middle(make_engine: Any, pool: Any, atomic: bool) -> None:
    """G8: an engine that ends while an iterator is half-way: the update raises EngineShutdownError, and
    writes no more."""
    engine = make_engine(W0.config)
    half, go_on = threading.Event(), threading.Event()
    updating = pool.submit(
        engine.update_weights_from_tensor,
        breaks(5, lambda: half.set() or go_on.wait(WAIT)),
        atomic=atomic,
    )
    assert half.wait(WAIT)
    engine.shutdown()
    go_on.set()
    with pytest.raises(EngineShutdownError):
        updating.result(WAIT)
    for path in WHOLE[:-1]:
        with pytest.raises(EngineShutdownError):
            engine.update_weights_from_tensor(**parcel(path, weights_of(W1)))


def test_two_looks_differ(kept: Kept) -> None:
    """What the tests here compare does tell weights apart that differ in one bit of one value."""
    weights = {name: tensor.clone() for name, tensor in weights_of(W0).items()}
    weights[NORM][3] = torch.nextafter(weights[NORM][3], torch.tensor(9.0))
    kept.engine.update_weights_from_tensor(weights)
    changed: Looks = looks(kept.engine)
    kept.reset()
    assert changed.checksum != kept.looks.checksum
