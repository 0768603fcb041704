"""What code inside an update's iterator may call: everything that doesn't wait for the update's end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.lifecycle.rollouts import (
    EXACT,
    ask,
    labels,
    owner,
    push,
    span_gap,
    take,
)
from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.errors import (
    EngineStateError,
    WeightsInvalidError,
    WeightUpdateError,
)
from tokenspeed_rl.requests import (
    GenerateReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightsFromTensorReqInput,
)

INSIDE: dict[str, Callable[[Engine, Any], Any]] = {
    "generate": lambda e, m: e.generate(input_ids=[1]),
    "generate, waiting": lambda e, m: e.generate(input_ids=[1], wait=True),
    "stream": lambda e, m: e.generate(input_ids=[1], stream=True),
    "request": lambda e, m: e.client.generate_request(GenerateReqInput(input_ids=[1])),
    "llm": lambda e, m: e.llm.generate(GenerateReqInput(input_ids=[1])),
    "update": lambda e, m: push(e, m),
    "update by iterator": lambda e, m: e.update_weights_from_tensor(m.named_parameters()),
    "weights_changed": lambda e, m: e.weights_changed(),
    "share": lambda e, m: e.share_weights(m),
    **{
        f"pause {mode}": lambda e, m, mode=mode: e.pause(mode)
        for mode in ("abort", "wait", "keep", "retract")
    },
    "release": lambda e, m: e.release_memory_occupation(),
    "release kv": lambda e, m: e.release_memory_occupation("kv_cache"),
    "wake": lambda e, m: e.resume_memory_occupation(),
}
AWAITED: dict[str, Callable[[Engine, Any], Any]] = {
    "pause_scheduler": lambda e, m: e.client.pause_scheduler(mode="wait"),
    "update": lambda e, m: e.client.update_weights_from_tensor(
        UpdateWeightsFromTensorReqInput(named_tensors=dict(m.named_parameters()))
    ),
    "release": lambda e, m: e.client.release_memory_occupation(ReleaseMemoryOccupationReqInput()),
    "wake": lambda e, m: e.client.resume_memory_occupation(ResumeMemoryOccupationReqInput()),
    "generate": lambda e, m: e.async_generate(input_ids=[1]),
}


def pairs_that_call(engine: Engine, model: Any, call: Callable[[], Any], refused: list[Any]) -> Iterator[Any]:
    """All pairs of `model`, with a call before the first and one in the middle, both noted."""
    for number, pair in enumerate(model.named_parameters()):
        if number in (0, 5):
            assert not engine.is_paused() and engine.get_internal_state()[0]["updating"]
            assert engine.get_load()[0].num_reqs == 0 and not engine.is_sleeping()
            engine.abort("nobody")
            try:
                refused.append(call())
            except Exception as error:
                refused.append(error)
        yield pair


@pytest.mark.parametrize("face", ["Engine", "AsyncLLM", "LLM.run"])
@pytest.mark.parametrize("what", INSIDE)
def test_from_inside_the_iterator(make_engine: Any, models: Any, face: str, what: str) -> None:
    """E15: generate, update, pause, release and wake from inside an update's iterator raise EngineStateError
    at once, whichever face runs the update; status and aborts are served; the update itself goes on."""
    engine = owner(make_engine, models["W0"])
    refused: list[Any] = []
    pairs = pairs_that_call(engine, models["W1"], lambda: INSIDE[what](engine, models["W1"]), refused)
    if face == "Engine":
        ok = engine.update_weights_from_tensor(pairs, weight_version="W1")
    else:
        obj = UpdateWeightsFromTensorReqInput(named_tensors=pairs, weight_version="W1")
        run = engine.llm.run if face == "LLM.run" else asyncio.run
        ok = run(engine.client.update_weights_from_tensor(obj))
    assert ok[0] is True, ok
    assert [type(error) for error in refused] == [EngineStateError] * 2
    assert not (engine.is_paused() or engine.is_sleeping())
    result = take(engine, ask(engine, [3, 4, 5]))
    assert span_gap(models, [3, 4, 5], result) < EXACT and labels(result) == [("W1", 0, 6)]


@pytest.mark.parametrize("what", AWAITED)
def test_awaited_from_inside_the_iterator(make_engine: Any, models: Any, what: str) -> None:
    """E15: the same calls of the client, awaited on an event loop that the iterator runs; what can answer
    False does, with the reason."""
    engine = owner(make_engine, models["W0"])
    refused: list[Any] = []
    pairs = pairs_that_call(
        engine, models["W1"], lambda: asyncio.run(AWAITED[what](engine, models["W1"])), refused
    )
    assert engine.update_weights_from_tensor(pairs, weight_version="W1")[0] is True
    for answer in refused:
        if what == "pause_scheduler":
            assert answer is False and "inside the iterator" in Tiny.state(engine)["last_refusal"]
        elif what == "update":
            assert answer[0] is False and type(answer.report) is EngineStateError
        else:
            assert type(answer) is EngineStateError
    assert len(refused) == 2 and span_gap(models, [3, 4], take(engine, ask(engine, [3, 4]))) < EXACT


def test_a_refusal_that_the_iterator_does_not_catch(make_engine: Any, models: Any) -> None:
    """E15: it fails the update like any exception of the iterator's, chained; the next update heals."""
    engine = owner(make_engine, models["W0"])

    def pairs() -> Iterator[Any]:
        yield next(models["W1"].named_parameters())
        engine.pause("wait")

    with pytest.raises(WeightUpdateError, match="invalid until a complete update") as raised:
        engine.update_weights_from_tensor(pairs())
    assert type(raised.value.__cause__) is EngineStateError
    with pytest.raises(WeightsInvalidError):
        engine.generate(input_ids=[1])
    push(engine, models["W1"], "W1")
    assert span_gap(models, [3], take(engine, ask(engine, [3]))) < EXACT


def test_a_task_made_in_the_iterator_runs_after_it(make_engine: Any, models: Any) -> None:
    """What the iterator starts for later, a task of its event loop, is outside of it: a pause from there is
    served."""
    engine, tasks = owner(make_engine, models["W0"]), []

    async def update() -> Any:
        def pairs() -> Iterator[Any]:
            for pair in models["W1"].named_parameters():
                if not tasks:
                    tasks.append(asyncio.ensure_future(engine.client.pause_scheduler(mode="keep")))
                yield pair

        obj = UpdateWeightsFromTensorReqInput(named_tensors=pairs(), weight_version="W1")
        return await engine.client.update_weights_from_tensor(obj), await tasks[0]

    (done, _), paused = asyncio.run(update())
    assert (done, paused, engine.is_paused()) == (True, True, True)
