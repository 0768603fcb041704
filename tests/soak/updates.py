"""Every way to change weights that are the engine's own, and ways to fail at it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from safetensors.torch import save
from torch import Tensor

from tests.soak.world import Side, World
from tokenspeed_rl.errors import EngineStateError, WeightUpdateError
from tokenspeed_rl.requests import UpdateWeightFromDiskReqInput, UpdateWeightsFromTensorReqInput
from tokenspeed_rl.weights import flatten

TRIES = 200


class Broken(Exception):
    """Raised by an iterator on purpose."""


def whole(world: World, side: Side, rng: random.Random, name: str) -> str:
    """A complete set, in each form; also without a label."""
    number, form = rng.randrange(len(world.weights.sets)), rng.choice(list(FORMS))
    label = None if rng.random() < 0.2 else f"{name}/{number}"
    fields = {"weight_version": label, "atomic": rng.random() < 0.3, "flush_cache": rng.random() < 0.5}
    reply = side.engine.update_weights_from_tensor(**FORMS[form](shuffled(world, number, rng)), **fields)
    _told(world, side, reply.report, number, label)
    if rng.random() < 0.3:
        _compare(world, reply.report, number)
    return f"done: {form} {label}"


def disk(world: World, side: Side, rng: random.Random, name: str) -> str:
    """A complete set out of a checkpoint."""
    number = rng.randrange(len(world.weights.sets))
    label = f"{name}/{number}"
    path, flush, engine = str(world.weights.folders[number]), rng.random() < 0.5, side.engine
    if rng.random() < 0.5:
        engine.update_weights_from_disk(path, weight_version=label, flush_cache=flush)
        return f"done: {label}"
    obj = UpdateWeightFromDiskReqInput(model_path=path, weight_version=label, flush_cache=flush)
    done, why, _ = engine.llm.run(engine.client.update_weights_from_disk(obj), rng.choice((None, 0.005)))
    return f"done: {done} {why[:60]}"


def pieces(world: World, side: Side, rng: random.Random, name: str) -> str:
    """A complete set in several calls, which those of other threads may come between."""
    number = rng.randrange(len(world.weights.sets))
    label, pairs = f"{name}/{number}", shuffled(world, number, rng)
    cuts = sorted(rng.sample(range(1, len(pairs)), rng.randrange(1, 4)))
    parts = [pairs[a:b] for a, b in zip([0, *cuts], [*cuts, len(pairs)], strict=True)]
    atomic = rng.random() < 0.3
    for part in parts:
        source = dict(part) if rng.random() < 0.5 else iter(part)
        reply = side.engine.update_weights_from_tensor(
            source, weight_version=label, partial=True, atomic=atomic
        )
    return f"done: {label} {reply.report.version}"


def subset(world: World, side: Side, rng: random.Random, name: str) -> str:
    """Some weights alone, valid ones staying valid."""
    number = rng.randrange(len(world.weights.sets))
    pairs = shuffled(world, number, rng)[: rng.randrange(1, 6)]
    reply = side.engine.update_weights_from_tensor(pairs, partial=True, flush_cache=rng.random() < 0.5)
    if reply.report.version != "invalid":
        side.book.tell(reply.report.version, dict(pairs), number)
    return f"done: {reply.report.version}"


def atomic(world: World, side: Side, rng: random.Random, name: str) -> str:
    """An iterator that breaks off: nothing has happened."""
    number = rng.randrange(len(world.weights.sets))
    source = breaking(shuffled(world, number, rng), rng)
    return _fails(side, source, weight_version=f"{name}/{number}", atomic=True)


def broken(world: World, side: Side, rng: random.Random, name: str) -> str:
    """An iterator that breaks off, then complete sets until one is accepted."""
    number = rng.randrange(len(world.weights.sets))
    outcome = _fails(side, breaking(shuffled(world, number, rng), rng), weight_version=f"{name}/{number}")
    for attempt in range(TRIES):
        try:
            make_whole(world, side, number, f"{name}.{attempt}/{number}")
        except EngineStateError:
            if world.journal.stop.wait(0.01):
                break
        else:
            return f"{outcome}, then {attempt} refused"
    return f"{outcome}, then {TRIES} refused"


def inside(world: World, side: Side, rng: random.Random, name: str) -> str:
    """An iterator that calls the engine: what would wait for the update is refused, the rest answers."""
    number = rng.randrange(len(world.weights.sets))
    engine, pairs = side.engine, shuffled(world, number, rng)
    at, calls = (
        rng.randrange(len(pairs)),
        [
            lambda: engine.pause("keep"),
            engine.release_memory_occupation,
            engine.resume_memory_occupation,
            lambda: engine.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 1}),
            lambda: engine.update_weights_from_tensor(pairs),
        ],
    )
    call: Any = rng.choice(calls)

    def calling() -> Iterator[tuple[str, Tensor]]:
        yield from pairs[:at]
        engine.get_internal_state()
        engine.abort("nobody")
        try:
            call()
        except EngineStateError:
            yield from pairs[at:]
        else:
            raise AssertionError("a call from inside an iterator was served")

    engine.update_weights_from_tensor(calling(), weight_version=f"{name}/{number}")
    return "done"


def late(world: World, side: Side, rng: random.Random, name: str) -> str:
    """Through the protocol, and given up soon: by the caller, or by the update's own timeout."""
    number, own = rng.randrange(len(world.weights.sets)), rng.random() < 0.5
    limit = rng.choice((1e-6, 1e-3, 5e-3, 2e-2))
    obj = UpdateWeightsFromTensorReqInput(
        named_tensors=iter(shuffled(world, number, rng)),
        weight_version=f"{name}/{number}",
        atomic=rng.random() < 0.5,
        timeout=limit if own else None,
    )
    engine = side.engine
    done, why = engine.llm.run(engine.client.update_weights_from_tensor(obj), None if own else limit)
    return f"done: {done} {why[:60]}"


def make_whole(world: World, side: Side, number: int, label: str) -> None:
    """One complete set."""
    side.engine.update_weights_from_tensor(world.weights.sets[number], weight_version=label)


def shuffled(world: World, number: int, rng: random.Random) -> list[tuple[str, Tensor]]:
    """A set's pairs in any order."""
    pairs = list(world.weights.sets[number].items())
    rng.shuffle(pairs)
    return pairs


def breaking(pairs: list[tuple[str, Tensor]], rng: random.Random) -> Iterator[tuple[str, Tensor]]:
    """Some of the pairs, then an exception."""
    at = rng.randrange(len(pairs))

    def source() -> Iterator[tuple[str, Tensor]]:
        yield from pairs[:at]
        raise Broken

    return source()


def _fails(side: Side, source: Iterator[tuple[str, Tensor]], **fields: Any) -> str:
    try:
        side.engine.update_weights_from_tensor(source, **fields)
    except WeightUpdateError as error:
        assert isinstance(error.__cause__, Broken), error
        return f"failed: {error}"
    raise AssertionError("an iterator that raised made a complete update")


def _told(world: World, side: Side, report: Any, number: int, label: str | None) -> None:
    assert len(report.loaded) == len(world.weights.names) and not report.missing
    if label is None:
        side.book.tell(report.version, world.weights.names, number)
    else:
        assert report.version == label


def _compare(world: World, report: Any, number: int) -> None:
    """The receipt's digest is the set's, or can't be had any more."""
    try:
        digest = report.checksum
    except EngineStateError:
        return
    assert digest == world.weights.checksums[number], f"the digest of {report.version} is another set's"


FORMS: dict[str, Any] = {
    "mapping": lambda pairs: {"named_tensors": dict(pairs)},
    "list": lambda pairs: {"named_tensors": pairs},
    "iterator": lambda pairs: {"named_tensors": iter(pairs)},
    "bucket": lambda pairs: {"named_tensors": flatten(pairs), "load_format": "flattened_bucket"},
    "bytes": lambda pairs: {"serialized_named_tensors": [save(dict(pairs))]},
}
CALLS = [
    (whole, 10), (disk, 2), (pieces, 4), (subset, 4), (atomic, 3), (broken, 2), (inside, 2), (late, 3),
]  # fmt: skip
