"""One soak, from beginning to end."""

from __future__ import annotations

import faulthandler
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.soak import updates
from tests.soak.control import Controller
from tests.soak.generate import Generator
from tests.soak.journal import Journal
from tests.soak.memory import MemoryWatch
from tests.soak.world import World
from tests.tiny import Tiny

THREADS = 4
HUNG_AFTER = 60.0
REPORT_EVERY = 10.0
SAMPLES = 100
"""Of memory, over the run."""

Say = Callable[[str], object]


def soak(seconds: float, seed: int, family: str, say: Say) -> Journal:
    """One soak of a world of its own; the journal holds its faults."""
    journal = Journal()
    with tempfile.TemporaryDirectory() as folder:
        world = World(seed, family, Path(folder), journal)
        threads = [Generator(world, f"g{i}") for i in range(THREADS)]
        threads += [Controller(world, f"c{i}") for i in range(THREADS)]
        try:
            _warm_up(world)
            watch = MemoryWatch(world)
            for thread in threads:
                thread.start()
            try:
                _look_on(world, watch, seconds, say)
            except Exception as error:
                journal.crashed("main", error)
            journal.stop.set()
            _gather(world, threads)
            if not journal.faults:
                _finish(world, watch, say)
        except Exception as error:
            journal.crashed("main", error)
        finally:
            world.shutdown()
    return journal


def _warm_up(world: World) -> None:
    """Map everything, and let every thread pool and cache come up before memory is measured."""
    for side in (world.own, world.shared):
        side.engine.generate(input_ids=world.prompts, sampling_params={"max_new_tokens": 8, "n": 2})
    for number in range(len(world.weights.sets)):
        updates.make_whole(world, world.own, number, f"warm-up {number}/{number}")


def _look_on(world: World, watch: MemoryWatch, seconds: float, say: Say) -> None:
    journal, began = world.journal, time.monotonic()
    report, sample = began + REPORT_EVERY, began
    while (now := time.monotonic()) < began + seconds and not journal.stop.wait(min(0.1, seconds / SAMPLES)):
        if now >= sample:
            watch.sample()
            sample += seconds / SAMPLES
        if now >= report:
            report += REPORT_EVERY
            say(f"{now - began:6.0f} s  {totals(journal)}")
        if stuck := journal.stuck(HUNG_AFTER):
            _hang(journal, "; ".join(stuck))
            return


def _hang(journal: Journal, what: str) -> None:
    faulthandler.dump_traceback(sys.__stderr__)
    journal.fault(f"hung: {what}")


def _gather(world: World, threads: Sequence[Generator | Controller]) -> None:
    """Every thread ends, once nothing that it waits for is left."""
    end = time.monotonic() + HUNG_AFTER
    while left := [thread for thread in threads if not thread.join(0.02)]:
        for side in (world.own, world.shared):
            side.engine.abort()
        if time.monotonic() > end:
            _hang(world.journal, f"{', '.join(thread.name for thread in left)} didn't end")
            return


def _finish(world: World, watch: MemoryWatch, say: Say) -> None:
    """Everything comes back: turn, memory, weights, pages."""
    number = random.Random(world.seed).randrange(len(world.weights.sets))
    for side in (world.own, world.shared):
        engine = side.engine
        engine.resume()
        engine.resume_memory_occupation()
        if side is world.own:
            updates.make_whole(world, side, number, f"last/{number}")
        else:
            world.write(world.modules[world.trained], number)
            engine.weights_changed(f"last/{number}")
        assert engine.weights_checksum() == world.weights.checksums[number], "the last weights are others"
        outputs = engine.generate(
            input_ids=world.prompts, sampling_params={"max_new_tokens": 8}, return_logprob=True, timeout=60.0
        )
        model = world.skeleton_of(number)
        gap = max(Tiny.gap(model, p, o) for p, o in zip(world.prompts, outputs, strict=True))
        assert gap < 1e-4, f"{side.name}: the last outputs are {gap:.1e} off"
        Tiny.all_back(engine)
        say(f"{side.name}: {engine.get_internal_state()[0]['num_retractions']} retractions")
    world.draws.check()
    say(f"seeds: {world.draws.compared:,} tokens drawn again, {len(world.draws.parted)} times others")
    words, flat = watch.verdict()
    say(f"memory: {words}")
    assert flat, f"memory is not flat: {words}"


def totals(journal: Journal) -> str:
    """What was checked so far, in a line."""
    counts = journal.counts
    return (
        f"{counts['samples']:,} samples checked, {counts['tokens']:,} tokens exact, "
        f"{counts['frozen tokens']:,} frozen, {counts['samples of several versions']:,} of several versions; "
        f"slowest status {journal.slowest_status:.3f} s"
    )
