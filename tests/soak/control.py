"""A thread that makes control calls, one after the other, at random."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from tests.soak import training, updates
from tests.soak.worker import Worker
from tests.soak.world import Side, World
from tokenspeed_rl.errors import EngineStateError, EngineTimeoutError
from tokenspeed_rl.requests import GetWeightsByNameReqInput, ReleaseMemoryOccupationReqInput

MODES = ("abort", "wait", "wait", "keep", "keep", "retract", "retract")
TAGS = ("weights", "kv_cache", "cuda_graph")
PACE = 0.03
"""Seconds between two calls of a thread, on average: generation needs its turn."""
SOON = (None, None, 0.001, 0.02, 0.2)
"""Timeouts of a pause or release."""

Call = Callable[[World, Side, random.Random, str], str | None]


class Controller(Worker):
    """Calls that move the engine's state."""

    pace = PACE

    def call(self, number: int, rng: random.Random) -> None:
        shared = rng.random() < 0.25
        side = self.world.shared if shared else self.world.own
        call = rng.choices(*(SHARED if shared else OWN))[0]
        self.journal.begin(self.name, f"{side.name} {call.__name__} {number}")
        try:
            outcome = call(self.world, side, rng, f"{self.name}.{number}") or "done"
        except EngineTimeoutError as error:
            outcome = f"timed out: {error}"
        except EngineStateError as error:
            outcome = f"refused: {error}"
        self.journal.end(self.name, outcome)


def pause(world: World, side: Side, rng: random.Random, name: str) -> str | None:
    """Either verb; some give up soon."""
    mode, timeout = rng.choice(MODES), rng.choice(SOON)
    with world.trainer if side is world.shared else nullcontext():
        if rng.random() < 0.5:
            return f"done: {mode} {side.engine.pause(mode, timeout=timeout)}"
        done = side.engine.llm.run(side.engine.client.pause_scheduler(mode=mode), timeout)
    return f"done: {mode} {done}"


def resume(world: World, side: Side, rng: random.Random, name: str) -> None:
    """Whatever is paused, or about to be."""
    with world.trainer if side is world.shared else nullcontext():
        side.engine.resume()


def paused(world: World, side: Side, rng: random.Random, name: str) -> str:
    """For a moment."""
    mode = rng.choice(MODES)
    with world.trainer if side is world.shared else nullcontext(), side.engine.paused(mode):
        world.journal.stop.wait(rng.expovariate(1 / PACE))
    return f"done: {mode}"


def release(world: World, side: Side, rng: random.Random, name: str) -> str:
    """Any tags; some give up soon."""
    tags, timeout, engine = some_tags(rng), rng.choice(SOON), side.engine
    if rng.random() < 0.5:
        engine.release_memory_occupation(tags, timeout=timeout)
    else:
        obj = ReleaseMemoryOccupationReqInput(tags=tags)
        engine.llm.run(engine.client.release_memory_occupation(obj), timeout)
    return f"done: {tags}"


def wake(world: World, side: Side, rng: random.Random, name: str) -> str:
    """Mostly all that sleeps."""
    tags = None if rng.random() < 0.8 else some_tags(rng)
    side.engine.resume_memory_occupation(tags)
    return f"done: {tags}"


def resident(world: World, side: Side, rng: random.Random, name: str) -> str:
    """For a moment."""
    tags = some_tags(rng)
    with side.engine.resident(*([tags] if isinstance(tags, str) else tags or [])):
        world.journal.stop.wait(rng.expovariate(1 / PACE))
    return f"done: {tags}"


def flush(world: World, side: Side, rng: random.Random, name: str) -> None:
    """The prefix cache."""
    assert side.engine.flush_cache().success


def abort(world: World, side: Side, rng: random.Random, name: str) -> str:
    """One request, or rarely all."""
    live = sorted(side.live)
    rid = None if rng.random() < 0.02 else rng.choice([*live, "nobody"])
    side.engine.abort(rid)
    return f"done: {rid}"


def status(world: World, side: Side, rng: random.Random, name: str) -> None:
    """All calls that answer at once, whatever else goes on."""
    engine, client = side.engine, side.engine.client
    began = time.monotonic()
    state = engine.get_internal_state()[0]
    load, report = engine.get_load()[0], engine.memory_report()
    flags = engine.is_paused(), engine.is_sleeping(), engine.llm.run(client.is_sleeping())
    world.journal.status_took(time.monotonic() - began)
    assert all(isinstance(flag, bool) for flag in flags)
    pages = state["pages"]
    assert 0 <= pages["free"] <= pages["total"] and load.num_reqs >= load.num_waiting_reqs >= 0
    for tag in TAGS:
        assert 0 <= report[tag]["mapped"] <= report[tag]["virtual"], report


def read(world: World, side: Side, rng: random.Random, name: str) -> str:
    """Weights, where they can be read; a half-written or released one never is."""
    parameter, rows, all_of_them = rng.choice(world.weights.names), rng.randrange(4), rng.random() < 0.5
    with world.trainer if side is world.shared else nullcontext():
        if all_of_them:
            side.engine.weights_checksum()
            assert {n for n, _ in side.engine.named_parameters()} == set(world.weights.names)
            return "done: checksum"
        obj = GetWeightsByNameReqInput(name=parameter, truncate_size=rows)
        found = side.engine.llm.run(side.engine.client.get_weights_by_name(obj))
    known = [tensors[parameter][:rows].tolist() for tensors in world.weights.sets]
    assert found in known, f"{parameter} is of no set: {found}"
    return "done: one"


def some_tags(rng: random.Random) -> Any:
    """None, one tag, or several."""
    kind = rng.randrange(3)
    if kind == 0:
        return None
    return rng.choice(TAGS) if kind == 1 else rng.sample(TAGS, rng.randrange(1, 4))


COMMON: list[tuple[Call, int]] = [
    (pause, 6), (resume, 12), (paused, 8), (release, 3), (wake, 9), (resident, 2), (flush, 3), (abort, 3),
    (status, 6), (read, 3),
]  # fmt: skip
OWN = tuple(zip(*COMMON, *updates.CALLS, strict=True))
SHARED = tuple(zip(*COMMON, *training.CALLS, strict=True))
