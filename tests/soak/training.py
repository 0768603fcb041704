"""What a trainer does with an engine that shares its module."""

from __future__ import annotations

import random

from tests.soak.world import Side, World
from tokenspeed_rl.errors import EngineStateError


def train(world: World, side: Side, rng: random.Random, name: str) -> str:
    """Steps: the engine is paused, other values are written, the engine is told, and resumed."""
    mode = rng.choice(("abort", "wait", "keep", "keep", "retract", "retract"))
    number, module = rng.randrange(len(world.weights.sets)), rng.randrange(2)
    switch = rng.random() < 0.2
    with world.trainer, side.engine.paused(mode):
        if switch:
            world.trained = module
        world.write(world.modules[world.trained], number)
        if switch:
            receipt = side.engine.llm.run(
                side.engine.client.share_weights(world.modules[world.trained], f"{name}/{number}")
            )
        else:
            receipt = side.engine.weights_changed(f"{name}/{number}")
        assert receipt.bytes == 0 and receipt.kind == "shared", receipt
        assert receipt.version == f"{name}/{number}"
    return f"done: {mode} {name}/{number}"


def copy(world: World, side: Side, rng: random.Random, name: str) -> str:
    """A copying update of a shared module is refused, and writes nothing."""
    try:
        side.engine.update_weights_from_tensor(world.weights.sets[0], weight_version=f"{name}/0")
    except EngineStateError as error:
        return f"refused: {error}"
    raise AssertionError("weights of a trainer's module were written")


CALLS = [(train, 14), (copy, 2)]
