"""`set_internal_state` changes settings while requests run, all of a call or none."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.tiny import Tiny
from tokenspeed_rl import Engine, requests
from tokenspeed_rl.errors import (
    ConfigError,
    EngineShutdownError,
    EngineStateError,
    OutOfMemoryError,
    RequestError,
    TokenSpeedError,
)

WAIT = 20.0
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 4}
MakeEngine = Callable[..., Engine]


def plans_of(engine: Engine) -> list[tuple[int, int]]:
    """(requests, prompt tokens) of every step from now on."""
    runner: Any = engine.client._core.loop.runner
    seen, run = [], runner.run

    def note(plan: Any) -> Any:
        seen.append((len(plan.decodes) + len(plan.chunks), sum(chunk.count for chunk in plan.chunks)))
        return run(plan)

    runner.run = note
    return seen


# set_internal_state: each field has its effect


def test_max_running_requests(make_engine: MakeEngine, counting: Any) -> None:
    """The next steps compute at most so many samples; all come to their end."""
    engine = make_engine(counting, enable_prefix_caching=False)
    plans = plans_of(engine)
    prompts = [[number] for number in range(8)]
    engine.generate(input_ids=prompts, sampling_params=GREEDY)
    assert max(count for count, _ in plans) == 8
    for most in (3, 5):
        plans.clear()
        assert engine.set_internal_state(max_running_requests=most) == [True]
        assert Tiny.state(engine)["server_args"]["max_running_requests"] == most
        results = engine.generate(input_ids=prompts, sampling_params=GREEDY)
        assert max(count for count, _ in plans) == most
        assert [each["output_ids"][0] for each in results] == list(range(1, 9))


def test_lowering_it_sends_nobody_back(
    make_engine: MakeEngine, counting: Any, pool: ThreadPoolExecutor
) -> None:
    """What runs goes on; nothing is retracted."""
    engine = make_engine(counting)
    lowered = Tiny.after_step(engine, 2, lambda: engine.set_internal_state(max_running_requests=1))
    results = engine.generate(input_ids=[[1], [2], [3]], sampling_params=GREEDY)
    assert lowered.result(WAIT) == [True]
    assert [each["output_ids"] for each in results] == [[2, 3, 4, 5], [3, 4, 5, 6], [4, 5, 6, 7]]
    assert Tiny.state(engine)["num_retractions"] == 0


def test_chunked_prefill_size(make_engine: MakeEngine, counting: Any) -> None:
    """A prompt takes as many steps as the new size makes of it."""
    engine = make_engine(counting, enable_prefix_caching=False)
    plans = plans_of(engine)
    for size in (2048, 7):
        plans.clear()
        engine.set_internal_state({"chunked_prefill_size": size})
        engine.generate(input_ids=list(range(30)), sampling_params=GREEDY)
        chunks = [tokens for _, tokens in plans if tokens]
        assert chunks == [min(size, 30 - start) for start in range(0, 30, size)]


def test_log_level(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    """Messages that were not enabled when last asked for are, from the change on; and back."""
    model = Tiny.model()
    engine = make_engine(model)
    for level, count in (("warning", 0), ("info", 1), ("error", 0), ("debug", 1)):
        caplog.clear()
        engine.set_internal_state(log_level=level)
        engine.weights_changed()
        assert len([line for line in caplog.messages if "weights are version" in line]) == count


def test_mem_fraction_and_reserve_bytes(make_engine: MakeEngine, tmp_path: Any) -> None:
    """Both count from the next wake on; a wake that finds no room can be tried again with other values."""
    engine = make_engine(Tiny.model(), max_total_tokens=None, mem_fraction=0.5)
    engine.generate(input_ids=[1], sampling_params=GREEDY)
    memory = engine.client._core.source.memory
    total = Tiny.state(engine)["pages"]["total"]
    page = engine.client._core.kv.layout.page_bytes
    engine.set_internal_state(mem_fraction=100 * page / memory.free())
    assert Tiny.state(engine)["pages"]["total"] == total > 200, "not yet"
    engine.release_memory_occupation("kv_cache")
    engine.resume_memory_occupation("kv_cache")
    assert 50 < Tiny.state(engine)["pages"]["total"] < 200
    engine.release_memory_occupation("kv_cache")
    engine.set_internal_state(reserve_bytes=2**60)
    with pytest.raises(OutOfMemoryError, match=str(2**60)):
        engine.resume_memory_occupation()
    engine.set_internal_state(reserve_bytes=0, mem_fraction=0.5)
    engine.resume_memory_occupation()
    assert Tiny.state(engine)["pages"]["total"] == total
    sized = make_engine(Tiny.model())
    with pytest.raises(EngineStateError, match="max_total_tokens"):
        sized.set_internal_state(mem_fraction=0.25)
    assert Tiny.state(sized)["server_args"]["mem_fraction"] == 0.5


def test_enable_prefix_caching(make_engine: MakeEngine) -> None:
    """Off, nothing is found or kept; on again, only what was computed since is."""
    engine, prompt = make_engine(Tiny.model(), page_size=4), Tiny.prompt(30)

    def cached() -> int:
        result = engine.generate(input_ids=prompt, sampling_params=GREEDY)
        return int(result["meta_info"]["cached_tokens"])

    assert [cached(), cached()] == [0, 28]
    engine.set_internal_state(enable_prefix_caching=False)
    assert Tiny.state(engine)["pages"]["cached"] == 0
    assert [cached(), cached()] == [0, 0]
    engine.set_internal_state(enable_prefix_caching=True)
    assert [cached(), cached()] == [0, 28]


@pytest.mark.parametrize("first", [True, False], ids=["on", "off"])
def test_switching_the_cache_under_way_mixes_nothing_up(make_engine: MakeEngine, first: bool) -> None:
    """Samples in flight while it is switched off and on: every logprob is that of a recompute, then and for
    prompts that go on from what was cached meanwhile."""
    model = Tiny.model()
    engine = make_engine(model, page_size=4, enable_prefix_caching=first, chunked_prefill_size=16)
    prompts = [Tiny.prompt(19, seed) for seed in (0, 0, 1, 2)]
    params = {"temperature": 0, "max_new_tokens": 40}
    switches = [
        Tiny.after_step(engine, at, lambda on=on: engine.set_internal_state(enable_prefix_caching=on))
        for at, on in ((3, not first), (14, first), (25, not first), (33, True))
    ]
    results = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
    assert all(each.result(WAIT) == [True] for each in switches)
    longer = [[*p, *each["output_ids"], 7] for p, each in zip(prompts, results, strict=True)]
    for _ in range(2):
        again = engine.generate(input_ids=longer, sampling_params=GREEDY, return_logprob=True)
        for prompt, each in [*zip(prompts, results, strict=True), *zip(longer, again, strict=True)]:
            assert Tiny.gap(model, prompt, each) < 1e-4
    assert again[0]["meta_info"]["cached_tokens"] > 40
    Tiny.all_back(engine)


def test_a_label_aborts_nobody_and_keeps_the_cache(make_engine: MakeEngine) -> None:
    """D3, contract 6: the same label splits no span, another one does; two labels of one epoch share KV."""
    model = Tiny.model()
    engine, prompt = make_engine(model, page_size=4), Tiny.prompt(30)
    epoch = Tiny.state(engine)["weight_epoch"]
    same = Tiny.after_step(engine, 3, lambda: engine.set_internal_state(weight_version="default"))
    other = Tiny.after_step(engine, 5, lambda: engine.set_internal_state(weight_version="step-1"))
    result = engine.generate(
        input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 8}, return_logprob=True
    )
    assert same.result(WAIT) == other.result(WAIT) == [True]
    meta = result["meta_info"]
    assert meta["finish_reason"]["type"] == "length" and meta["weight_version"] == "step-1"
    first, second = meta["weight_versions"]
    assert (first["version"], first["start"], second["version"], second["end"]) == ("default", 0, "step-1", 8)
    assert first["end"] == second["start"] in (4, 5)
    assert Tiny.gap(model, prompt, result) < 1e-4
    again = engine.generate(input_ids=prompt, sampling_params=GREEDY)["meta_info"]
    assert again["cached_tokens"] == 28 and again["weight_version"] == "step-1"
    state = Tiny.state(engine)
    assert (state["weight_version"], state["weight_epoch"]) == ("step-1", epoch)
    assert state["num_retractions"] == state["num_aborted"] == 0


# ... or none has


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"seed": 3}, RequestError, "max_running_requests"),
        ({"page_size": 8}, RequestError, "page_size"),
        ({"max_runing_requests": 8}, RequestError, "Did you mean 'max_running_requests'"),
        ({"weight_version": ""}, RequestError, "weight_version"),
        ({"weight_version": 3}, RequestError, "weight_version"),
        ({"max_running_requests": 0}, ConfigError, "in 1"),
        ({"max_running_requests": 2**63}, ConfigError, "in 1"),
        ({"reserve_bytes": -(2**70)}, ConfigError, "in 0"),
        ({"chunked_prefill_size": "many"}, ConfigError, "of type int"),
        ({"log_level": "loud"}, ConfigError, "one of"),
        ({"watchdog_timeout": math.inf}, ConfigError, "finite"),
        ({"dump_requests_folder": "/proc/nowhere"}, RequestError, "can't be written"),
        ({"server_args": [1]}, RequestError, "server_args"),
        ({"server_args": {"weight_version": "x"}}, RequestError, "weight_version"),
    ],
    ids=str,
)
def test_all_or_none(
    counter: Engine, fields: dict[str, Any], error: type[TokenSpeedError], words: str
) -> None:
    """A field that can't change, or not to that value, is refused by name, and the good ones beside it don't
    change either; the client answers [False] with the reason."""
    before = Tiny.state(counter)["server_args"]
    label = fields.pop("weight_version", None) if "weight_version" in fields else None
    server_args = fields.get("server_args", fields)
    if isinstance(server_args, dict):
        server_args = {"max_running_requests": 7, **server_args}
    with pytest.raises(error, match=words):
        counter.set_internal_state(server_args, weight_version=label)
    obj = requests.SetInternalStateReq(server_args=server_args, weight_version=label)
    assert counter.llm.run(counter.client.set_internal_state(obj)) == [False]
    state = Tiny.state(counter)
    assert words in state["last_refusal"]
    assert state["server_args"] == before and state["weight_version"] == "default"
    assert counter.generate(input_ids=[1], sampling_params=GREEDY)["output_ids"] == [2, 3, 4, 5]


def test_the_client_takes_the_struct_alone(counter: Engine) -> None:
    """[True] for what is done; another object is refused; after shutdown it raises."""
    client, run = counter.client, counter.llm.run
    obj = requests.SetInternalStateReq(server_args={"max_running_requests": 9})
    assert run(client.set_internal_state(obj)) == [True]
    assert client.server_args.max_running_requests == 9
    wrong: Any = {"max_running_requests": 5}
    assert run(client.set_internal_state(wrong)) == [False]
    assert "SetInternalStateReq" in Tiny.state(counter)["last_refusal"]
    assert run(client.set_internal_state(requests.SetInternalStateReq())) == [True], "nothing to do"


def test_the_config_of_the_caller_stays_his(make_engine: MakeEngine, caplog: Any) -> None:
    """The engine's copy changes, not the EngineConfig it was made with."""
    from tokenspeed_rl import EngineConfig

    caplog.set_level(logging.CRITICAL)
    config = EngineConfig(max_running_requests=4)
    engine = make_engine(Tiny.model(), config=config)
    engine.set_internal_state(max_running_requests=2)
    assert config.max_running_requests == 4 and engine.client.server_args.max_running_requests == 2
    engine.shutdown()
    with pytest.raises(EngineShutdownError):
        engine.set_internal_state(max_running_requests=3)
    assert torch.is_grad_enabled()
