"""Failures reach those they belong to: the loop's everybody, chained; a command's its caller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tokenspeed_rl import Engine
from tokenspeed_rl.errors import (
    EngineDeadError,
    EngineStateError,
    OutOfMemoryError,
    RequestError,
    WeightsInvalidError,
)
from tokenspeed_rl.requests import GenerateReqInput

WAIT = 20.0
GREEDY = {"temperature": 0, "max_new_tokens": 4}


class Broken(RuntimeError):
    """What a test makes the engine's insides raise."""


def break_forward(engine: Engine) -> None:
    def forward(*_: Any, **__: Any) -> Any:
        raise Broken("in the forward")

    engine.client._core.source.decoder.forward = forward  # type: ignore[method-assign]


def break_scheduler(engine: Engine) -> None:
    def schedule() -> Any:
        raise Broken("in the scheduler")

    engine.client._core.scheduler.schedule = schedule  # type: ignore[method-assign]


def break_queue(engine: Engine) -> None:
    def remove(_: Any) -> None:
        raise Broken("in the queue")

    engine.client._core.scheduler.remove = remove  # type: ignore[method-assign]


@pytest.mark.parametrize(("insides", "lost"), [(break_forward, 4), (break_scheduler, 3), (break_queue, 2)])
def test_an_exception_in_the_loop(
    counting: Any,
    make_engine: Any,
    step_gate: Any,
    pool: Any,
    insides: Callable[[Engine], None],
    lost: int,
) -> None:
    """G3: an exception in the loop reaches every waiter of every kind as EngineDeadError with the cause
    chained, later calls raise the same, nobody hangs, and shutdown still works."""
    engine = make_engine(counting)
    ask: dict[str, Any] = dict(sampling_params={"max_new_tokens": 100})

    async def awaiting() -> Any:
        return await engine.async_generate(input_ids=[3], **ask)

    with step_gate(engine) as gate:
        stream = engine.generate(input_ids=[1], **ask, stream=True)
        gate.step()
        gate.wait()
        waiting = [
            pool.submit(engine.generate, input_ids=[2], rid="gone", **ask),
            pool.submit(engine.generate, input_ids=[[2], [3]], **ask),
            pool.submit(lambda: asyncio.run(awaiting())),
            pool.submit(engine.flush_cache),
        ]
        gate.submitted(4)
        gate.commanded(2)
        insides(engine)
        if insides is break_queue:
            engine.abort("gone")
        gate.open()
        outcomes = []
        for waiter in waiting:
            try:
                outcomes.append(waiter.result(WAIT))
            except EngineDeadError as error:
                outcomes.append(error)
        tokens: list[int] = []
        with pytest.raises(EngineDeadError) as caught:
            for message in stream:
                tokens += message["output_ids"]
    assert tokens, "what was there before is delivered"
    errors = [outcome for outcome in outcomes if isinstance(outcome, EngineDeadError)]
    assert len(errors) == lost, "what was served before the failure keeps its result"
    for error in (*errors, caught.value):
        assert isinstance(error.__cause__, Broken) and "Broken: in the" in str(error)
    assert len({id(error) for error in errors}) == len(errors), "each has its own, with its own traceback"
    calls: list[Callable[[], Any]] = [
        lambda: engine.generate(input_ids=[1]),
        lambda: engine.generate(input_ids=[1], stream=True),
        engine.flush_cache,
        engine.weights_changed,
        engine.get_load,
        engine.get_internal_state,
        lambda: asyncio.run(awaiting()),
    ]
    for call in calls:
        with pytest.raises(EngineDeadError) as later:
            call()
        assert later.value.__cause__ is errors[0].__cause__
    engine.abort()
    assert not engine.is_paused() and not engine.is_sleeping()
    loop_thread = engine.client._core.loop._thread
    engine.shutdown()
    assert not loop_thread.is_alive()


def test_a_failed_engine_beside_a_good_one(counting: Any, make_engine: Any, counter: Engine) -> None:
    """G3, G9: a dead engine leaves another one on the same module alone, and a new one can be made."""
    engine = make_engine(counting)
    break_forward(engine)
    with pytest.raises(EngineDeadError):
        engine.generate(input_ids=[1])
    assert counter.generate(input_ids=[1], sampling_params=GREEDY)["output_ids"] == [2, 3, 4, 5]
    assert make_engine(counting).generate(input_ids=[1], sampling_params=GREEDY)["output_ids"] == [2, 3, 4, 5]


def test_a_failing_command(counter: Engine, step_gate: Any, pool: Any) -> None:
    """The exception of a control call reaches its caller alone; requests in flight and the engine go on."""
    with step_gate(counter) as gate:
        running = pool.submit(counter.generate, input_ids=[5], sampling_params=GREEDY)
        gate.step()
        gate.wait()
        failing = pool.submit(counter.get_weights_by_name, "model.layers.7.nothing")
        other = pool.submit(counter.flush_cache)
        gate.commanded(2)
        gate.open()
        with pytest.raises(RequestError, match="no such parameter"):
            failing.result(WAIT)
        assert other.result(WAIT).success
        assert running.result(WAIT)["output_ids"] == [6, 7, 8, 9]


def test_no_memory_for_the_cache(counting: Any, make_engine: Any) -> None:
    """No room for the KV cache: OutOfMemoryError with bytes wanted and free, and a later call tries again."""
    engine = make_engine(counting, max_total_tokens=None, max_running_requests=1, reserve_bytes=1 << 60)
    for _ in range(2):
        with pytest.raises(OutOfMemoryError) as caught:
            engine.generate(input_ids=[1])
        assert caught.value.wanted > 0 and caught.value.free > 0
    engine.client.server_args.reserve_bytes = 0
    assert engine.generate(input_ids=[5], sampling_params=GREEDY)["output_ids"] == [6, 7, 8, 9]


def test_a_shared_module_that_was_broken(tiny: Any, make_engine: Any, step_gate: Any, pool: Any) -> None:
    """Weights that turn out to be no longer shared stop the engine, not kill it: blocking calls raise
    WeightsInvalidError at once, requests in flight wait, and all goes on when the module is shared again."""
    model = tiny.successor()
    engine = make_engine(model)
    with step_gate(engine) as gate:
        running = pool.submit(engine.generate, input_ids=[5], sampling_params=GREEDY)
        gate.step(2)
        gate.wait()
        with torch.no_grad():
            model.lm_head.weight.data = model.lm_head.weight.data.clone()
        failing = pool.submit(engine.weights_changed)
        gate.commanded(2)
        gate.open()
        with pytest.raises(WeightsInvalidError, match="lm_head"):
            failing.result(WAIT)
    for call in (
        lambda: engine.generate(input_ids=[1]),
        lambda: engine.generate(input_ids=[1], stream=True),
        lambda: asyncio.run(engine.async_generate(input_ids=[1])),
        engine.weights_checksum,
        engine.named_parameters,
    ):
        with pytest.raises(WeightsInvalidError):
            call()
    assert not running.done() and engine.get_load()[0].num_reqs == 1
    assert "invalid" in tiny.state(engine)["validity"]
    engine.share_weights(model)
    result = running.result(WAIT)
    assert result["output_ids"] == [6, 7, 8, 9]
    assert [span["end"] for span in result["meta_info"]["weight_versions"]] == [3, 4]


def test_an_unhealthy_server(counter: Engine, step_gate: Any, pool: Any) -> None:
    """`mark_server_unhealthy` refuses new requests, of both faces, until `mark_server_up`; those in flight
    and other calls go on."""
    with step_gate(counter) as gate:
        running = pool.submit(counter.generate, input_ids=[5], sampling_params=GREEDY)
        gate.wait()
        counter.client.mark_server_unhealthy()
        for call in (
            lambda: counter.generate(input_ids=[1]),
            lambda: counter.generate(input_ids=[1], stream=True),
            lambda: asyncio.run(counter.async_generate(input_ids=[1])),
        ):
            with pytest.raises(EngineStateError, match="unhealthy"):
                call()
        assert counter.get_load()[0].num_reqs == 1
        assert counter.get_internal_state()[0]["status"] == "unhealthy"
        gate.open()
        assert running.result(WAIT)["output_ids"] == [6, 7, 8, 9]
    counter.client.mark_server_up()
    assert counter.generate(input_ids=[5], sampling_params=GREEDY)["output_ids"] == [6, 7, 8, 9]


def test_a_tokenizer_that_fails_ends_its_own_request(tiny: Any, counting: Any, make_engine: Any) -> None:
    """G3: what a tokenizer raises while stop strings are looked for ends that sample with its reason;
    one beside it, and the engine, go on."""

    class Failing(type(tiny.tokenizer())):  # type: ignore[misc]
        def decode(self, ids: Any, **_: Any) -> str:
            raise Broken("in decode")

    tokenizer = tiny.tokenizer()
    tokenizer.__class__ = Failing
    engine = make_engine(counting, tokenizer=tokenizer, max_total_tokens=1024)
    stopping = engine.llm.generate_stream(
        GenerateReqInput(input_ids=[5], sampling_params={**GREEDY, "stop": ["x"]}, stream=True)
    )
    with pytest.raises(Broken):
        list(stopping)  # its own text can't be made either
    engine.client.tokenizer = None
    result = engine.generate(input_ids=[[5], [9]], sampling_params=[{**GREEDY, "stop": ["x"]}, GREEDY])
    reasons = [output["meta_info"]["finish_reason"] for output in result]
    assert reasons[0]["type"] == "abort" and "Broken: in decode" in reasons[0]["message"]
    assert reasons[1] == {"type": "length", "length": 4} and result[1]["output_ids"] == [10, 11, 12, 13]


def test_calls_behind_a_failing_command_are_told(counting: Any, make_engine: Any) -> None:
    """G3: a command of the loop's own that fails takes none of those behind it into silence."""
    engine = make_engine(counting, max_total_tokens=1024)
    loop = engine.client._core.loop

    def fail() -> None:
        raise Broken("in a command")

    with loop.lock:  # both are in the inbox before the loop looks
        loop._inbox.append((fail, None))
        behind = loop.call(lambda: 1)
    with pytest.raises(EngineDeadError) as caught:
        behind.result(WAIT)
    assert isinstance(caught.value.__cause__, Broken)


def test_messages_reach_handlers_at_their_level(counting: Any, make_engine: Any) -> None:
    """Contract 7: `log_level` decides which of an engine's messages reach the package's logger."""
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger, handler = logging.getLogger("tokenspeed_rl"), Keep()
    logger.addHandler(handler)
    try:
        for level, expected in (("warning", 0), ("info", 1)):
            engine = make_engine(counting, max_total_tokens=1024, log_level=level)
            engine.generate(input_ids=[1], sampling_params=GREEDY)
            assert sum("KV cache" in record.getMessage() for record in records) == expected
    finally:
        logger.removeHandler(handler)


def test_a_handler_that_raises_keeps_nobody_waiting(counting: Any, make_engine: Any) -> None:
    """The loop logs its failure and then tells its callers; what a handler does with that is its own
    affair."""

    class Raise(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise Broken("in a handler")

    engine = make_engine(counting)
    logger, handler = logging.getLogger("tokenspeed_rl"), Raise()
    logger.addHandler(handler)
    try:
        break_forward(engine)
        with pytest.raises(EngineDeadError, match="in the forward"):
            engine.generate(input_ids=[1, 2], sampling_params=GREEDY, timeout=WAIT)
    finally:
        logger.removeHandler(handler)
