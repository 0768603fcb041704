"""What a wake, or the first request, finds room for, and what becomes of requests that were there before."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lifecycle.guarded import MiB, exact, rig
from tests.lifecycle.rollouts import EXACT, ask, labels, reason, span_gap, take
from tests.tiny import Tiny
from tokenspeed_rl.errors import RequestError

W0 = Tiny.model()
FREE = {"capacity": 4 * MiB, "max_total_tokens": None, "max_running_requests": 16, "mem_fraction": 1.0}


def test_kv_takes_what_is_free_at_each_wake(make_engine: Any, monkeypatch: Any) -> None:
    """Contract 5: without `max_total_tokens` the pages are as many as `mem_fraction` of what is free less
    `reserve_bytes` holds: at the first generate, and at each wake anew, within the reserved addresses."""
    reserve, fraction = 1 * MiB, 0.5
    made = rig(
        make_engine,
        monkeypatch,
        W0,
        capacity=8 * MiB,
        max_total_tokens=None,
        max_running_requests=16,
        reserve_bytes=reserve,
        mem_fraction=fraction,
        weights_backup="cpu",
    )
    engine, vmm = made.engine, made.vmm
    page, places = made.kv.layout.page_bytes, None
    assert made.kv.num_pages == 0 and vmm.usage()["kv_cache"].mapped == 0  # before the first generate
    virtual = vmm.usage()["kv_cache"].virtual
    for capacity in (8 * MiB, 4 * MiB, 16 * MiB, 3 * MiB // 2, 1024 * MiB, 8 * MiB):
        vmm.capacity = capacity
        if places is not None:
            engine.release_memory_occupation()
            engine.resume_memory_occupation()
        assert exact(W0, engine) < EXACT
        free = vmm.capacity - vmm.usage()["weights"].mapped
        units = int((free - reserve) * fraction) // made.kv.layout.stripes // vmm.unit
        fits = min(units * vmm.unit * made.kv.layout.stripes // page, made.kv.max_pages)
        assert vmm.usage()["kv_cache"].mapped <= (free - reserve) * fraction
        assert made.kv.num_pages == Tiny.state(engine)["pages"]["total"] == fits
        places = places or made.addresses()
        assert made.addresses() == places
        assert vmm.usage()["kv_cache"].virtual == virtual
        with pytest.raises(RequestError, match=f"KV capacity of {made.capacity}"):
            engine.generate(input_ids=[1], sampling_params={"max_new_tokens": made.capacity})
    assert made.kv.max_pages * page > virtual - 8 * made.vmm.unit


def test_a_smaller_cache_than_before(make_engine: Any, monkeypatch: Any) -> None:
    """Contract 5, A1: a wake into less memory. What could never be served ends with a message and what it
    has; who asked for as much as there is room for gets that; who fits is served exactly."""
    made = rig(make_engine, monkeypatch, W0, weights_backup="cpu", **FREE)
    engine, vmm, page = made.engine, made.vmm, made.kv.layout.page_bytes
    exact(W0, engine)
    long = Tiny.prompt(60)
    with Tiny.held(engine):
        pausing = engine.client._core.loop.open(
            lambda reply: engine.client._core.life.pause("retract", reply)
        )
        streams = {
            "fits": ask(engine, [1, 2, 3], max_new_tokens=20),
            "just fits": ask(engine, [1, 2], max_new_tokens=30),
            "too much": ask(engine, [1, 2], max_new_tokens=31),
            "long prompt": ask(engine, long, max_new_tokens=1),
            "score": ask(engine, long, max_new_tokens=0),
            "open": ask(engine, [5, 6, 7], max_new_tokens=None),
            "open and long": ask(engine, long, max_new_tokens=None),
        }
    pausing.result()
    engine.release_memory_occupation()
    vmm.capacity = vmm.usage()["weights"].host + 8 * page + page // 2
    engine.resume_memory_occupation()
    assert made.capacity == 32
    engine.resume()
    results = dict(zip(streams, take(engine, *streams.values()), strict=True))
    for name, count in (("fits", 20), ("just fits", 30), ("open", 29)):
        assert len(results[name]["output_ids"]) == count and reason(results[name]) == "length"
    assert span_gap({"W0": W0}, [5, 6, 7], results["open"]) < EXACT
    for name in ("too much", "long prompt", "score", "open and long"):
        assert results[name]["output_ids"] == []
        assert results[name]["meta_info"]["finish_reason"]["type"] == "abort"
        assert "32 tokens" in results[name]["meta_info"]["finish_reason"]["message"]
    Tiny.all_back(engine)


def test_a_wake_between_the_check_and_the_queue(make_engine: Any, monkeypatch: Any) -> None:
    """A1, B5: a request is measured before it is queued. A wake into less memory just in between ends it like
    those that are queued already, instead of leaving it waiting for pages that never come."""
    made = rig(make_engine, monkeypatch, W0, weights_backup="cpu", **FREE)
    engine, vmm, page = made.engine, made.vmm, made.kv.layout.page_bytes
    exact(W0, engine)
    engine.release_memory_occupation()
    intake = engine.client._core.intake
    prepare = type(intake).prepare

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        requests = prepare(self, *args, **kwargs)
        monkeypatch.setattr(type(intake), "prepare", prepare)
        engine.resume_memory_occupation()
        return requests

    vmm.capacity = vmm.usage()["weights"].host + 8 * page
    monkeypatch.setattr(type(intake), "prepare", slow)
    stream = ask(engine, [1, 2], max_new_tokens=200)
    small = ask(engine, [1, 2], max_new_tokens=8)
    assert "32 tokens" in take(engine, stream)["meta_info"]["finish_reason"]["message"]
    assert span_gap({"W0": W0}, [1, 2], take(engine, small)) < EXACT


@pytest.mark.parametrize("mode", [None, "keep", "retract"])
@pytest.mark.parametrize("tags", [["kv_cache"], ["weights"], None], ids=str)
def test_live_streams(make_engine: Any, monkeypatch: Any, pool: Any, mode: str | None, tags: Any) -> None:
    """C10, B7: a release with streams half-way. On a running engine they first run to their end; under keep
    or retract they stop where they are and go on after wake and resume, nothing drawn before changing; keep's
    KV outlives a release of the weights alone. The cache is empty afterwards where its memory was gone."""
    made = rig(make_engine, monkeypatch, W0, weights_backup="cpu")
    engine, warm = made.engine, Tiny.prompt(40, seed=3)
    exact(W0, engine, warm)
    prompts = [Tiny.prompt(9, seed) for seed in (1, 2)]

    def sleep() -> None:
        if mode is not None:
            engine.pause(mode)
        engine.release_memory_occupation(tags)

    slept = Tiny.after_step(engine, 4, sleep)
    with Tiny.held(engine):
        streams = [ask(engine, prompt, {"stream": False}, max_new_tokens=12) for prompt in prompts]
    slept.result(20)
    counts = [stream._requests[0].output_len for stream in streams]
    assert counts == ([12, 12] if mode is None else [4, 4])
    assert Tiny.state(engine)["num_running"] == (2 if mode == "keep" and tags == ["weights"] else 0)
    for act in (engine.resume_memory_occupation, engine.resume):
        act()
    for prompt, result in zip(prompts, take(engine, *streams), strict=True):
        assert labels(result) == [("W0", 0, 12)] and span_gap({"W0": W0}, prompt, result) < EXACT
    assert exact(W0, engine, warm, cached=36 if tags == ["weights"] else 0) < EXACT
    Tiny.all_back(engine)


@pytest.mark.parametrize("tags", [["kv_cache"], ["weights", "kv_cache"], ["weights"]], ids=str)
def test_before_the_first_generate(make_engine: Any, monkeypatch: Any, tags: Any) -> None:
    """A1, B2: an engine that never generated can sleep; who asks meanwhile waits, and is measured by the
    memory that the wake finds."""
    made = rig(make_engine, monkeypatch, W0, weights_backup="cpu", **FREE)
    engine = made.engine
    engine.release_memory_occupation(tags)
    assert made.vmm.usage()["kv_cache"].mapped == 0
    waiting = ask(engine, [1, 2], max_new_tokens=7)
    engine.resume_memory_occupation()
    assert span_gap({"W0": W0}, [1, 2], take(engine, waiting)) < EXACT
    assert made.kv.num_pages > 0 and exact(W0, engine) < EXACT
