"""Engines beside and after each other: independent, and nothing of an ended one is left."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import torch

from tokenspeed_rl import LLM, AsyncLLM, Engine
from tokenspeed_rl.requests import GenerateReqInput

WAIT = 20.0
LONG = {"max_new_tokens": 200}
GREEDY = {"temperature": 0, "max_new_tokens": 4}


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("tokenspeed_rl")]


def test_an_engine_that_is_dropped(counting: Any) -> None:
    """An engine, a facade or a client without any reference left ends its threads and frees its memory, also
    when it was used before and was part of a cycle."""
    before = set(engine_threads())
    engine = Engine(counting, max_total_tokens=256)
    engine.cycle = engine  # type: ignore[attr-defined]
    client = AsyncLLM(counting, max_total_tokens=256)
    facade = LLM(client)
    engine.generate(input_ids=[1], sampling_params=GREEDY)
    stream = engine.generate(input_ids=[1], sampling_params=LONG, stream=True)
    next(stream)
    facade.generate(GenerateReqInput(input_ids=[1], sampling_params=GREEDY))
    threads = set(engine_threads()) - before
    assert len(threads) == 6, "of each engine its loop, its watchdog, and a facade's event loop"
    watched = [weakref.ref(part) for part in (engine, client, facade, engine.client._core.kv, stream)]
    del engine, client, facade, stream
    gc.collect()
    for thread in threads:
        thread.join(WAIT)
    del thread
    gc.collect()
    assert not any(thread.is_alive() for thread in threads)
    assert [ref() for ref in watched] == [None] * 5


def test_shutdown_frees_the_engine_but_not_the_trainers_weights(counting: Any, make_engine: Any) -> None:
    """After shutdown the KV memory is gone while the shared parameters are what they were, and a new engine
    can share them."""
    before = {name: param.detach().clone() for name, param in counting.named_parameters()}
    engine = make_engine(counting)
    engine.generate(input_ids=[1], sampling_params=GREEDY)
    core = engine.client._core
    assert core.kv.nbytes > 0
    engine.shutdown()
    assert core.kv.nbytes == 0 and not core.source.store.weights
    assert all(torch.equal(before[name], param) for name, param in counting.named_parameters())
    again = make_engine(counting)
    assert again.generate(input_ids=[1], sampling_params=GREEDY)["output_ids"] == [2, 3, 4, 5]


def test_two_engines(tiny: Any, counting: Any, make_engine: Any, step_gate: Any, pool: Any) -> None:
    """G9: two engines in one process, of one module and of different ones, know nothing of each other: rids,
    caches, versions, stuck steps, shutdown."""
    one, two = make_engine(counting), make_engine(counting)
    other = make_engine(tiny.successor(lambda token: (token + 2) % 256))
    ask: dict[str, Any] = dict(input_ids=[10], sampling_params=GREEDY, rid="same")
    with step_gate(one) as gate:
        blocked = pool.submit(one.generate, **ask)
        gate.wait()
        assert two.generate(**ask)["output_ids"] == [11, 12, 13, 14]
        assert other.generate(**ask)["output_ids"] == [12, 14, 16, 18]
        two.abort()
        two.flush_cache()
        two.weights_changed("two's")
        gate.open()
    assert blocked.result(WAIT)["output_ids"] == [11, 12, 13, 14]
    assert [tiny.state(e)["weight_version"] for e in (one, two, other)] == ["default", "two's", "default"]
    two.shutdown()
    assert one.generate(**ask)["output_ids"] == [11, 12, 13, 14]
    one.shutdown()
    assert other.generate(**ask)["output_ids"] == [12, 14, 16, 18]


def test_two_engines_see_one_modules_step(tiny: Any, make_engine: Any) -> None:
    """G9: engines that share one module both follow what the trainer writes into it."""
    model = tiny.successor()
    one, two = make_engine(model), make_engine(model)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(3, 0))
    for engine in (one, two):
        engine.weights_changed()
        assert engine.generate(input_ids=[10], sampling_params=GREEDY)["output_ids"] == [14, 18, 22, 26]
