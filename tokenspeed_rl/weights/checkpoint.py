"""Filling the slots for the first time: from a checkpoint's files, or with seeded random values."""

from __future__ import annotations

import time
from itertools import groupby
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.weights.mapping import Coverage, Slot
from tokenspeed_rl.weights.receipt import Receipt
from tokenspeed_rl.weights.shards import Entry, entries
from tokenspeed_rl.weights.store import WeightStore


@torch.no_grad()
def load_checkpoint(store: WeightStore, directory: Path) -> Receipt:
    """Read the safetensors checkpoint in `directory` into the store, one tensor at a time, cast to its dtype.

    All headers are read and judged before the first byte is written: each weight of the model exactly once.
    The store's first weights are then valid.

    Raises:
        ConfigError: the files are missing, damaged, quantised, or in another format.
        WeightUpdateError: the tensors don't fit the model: missing, unknown, mis-shaped, given twice.
    """
    began = time.perf_counter()
    promised = entries(directory)
    coverage = Coverage(store.names)
    targets = [coverage.claim(entry.name, entry.shape) for entry in promised]
    _check_floats([entry for entry, target in zip(promised, targets, strict=True) if target is not None])
    coverage.check()
    store.allocate()
    nbytes = 0
    for path, group in groupby(zip(promised, targets, strict=True), key=lambda pair: pair[0].shard):
        try:
            with safe_open(path, framework="pt", device="cpu") as shard:
                for entry, target in group:
                    if target is not None:
                        nbytes += store.write(target, shard.get_tensor(entry.name))
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{path} could not be read: {error}", fix="Copy or download the file again."
            ) from error
    store.version.start()
    seconds = time.perf_counter() - began
    return store.receipt(loaded=coverage.loaded, nbytes=nbytes, seconds=seconds, kind="loaded")


@torch.no_grad()
def randomise(store: WeightStore, *, seed: int, std: float) -> Receipt:
    """Fill every slot with seeded random weights; the store's first weights are then valid.

    Norms are 1, biases 0, everything else normal with deviation `std` (a config's `initializer_range`), drawn
    in float32 on the CPU by a generator of its own: equal on every device, and no global random state is
    touched.
    """
    began = time.perf_counter()
    store.allocate()
    generator = torch.Generator("cpu").manual_seed(seed)
    for slot in store.slots:
        (fused,) = store.weights[slot.name]
        constant = _constant(slot)
        if constant is not None:
            fused.fill_(constant)
        else:
            drawn = torch.empty(slot.shape, dtype=torch.float32, device="cpu")
            fused.copy_(drawn.normal_(0.0, std, generator=generator))
    store.version.start()
    seconds = time.perf_counter() - began
    return store.receipt(loaded=store.names.hf_names, nbytes=store.nbytes, seconds=seconds, kind="random")


def _constant(slot: Slot) -> float | None:
    if slot.name.endswith("norm"):
        return 1.0
    return 0.0 if slot.name.endswith(".bias") else None


def _check_floats(found: list[Entry]) -> None:
    other = [f"{entry.name} is {entry.dtype}" for entry in found if not entry.is_float]
    if other:
        raise ConfigError(
            f"{len(other)} weights of the checkpoint are not plain floats: {', '.join(other[:3])}",
            fix="Dequantise the model and save it as float32, bfloat16 or float16.",
        )
