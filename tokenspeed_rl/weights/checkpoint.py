"""What fills the slots: a checkpoint's files, at the start and for updates, or seeded random values."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from io import BufferedReader
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.weights.mapping import Slot
from tokenspeed_rl.weights.receipt import Receipt
from tokenspeed_rl.weights.shards import Entry, entries
from tokenspeed_rl.weights.store import WeightStore
from tokenspeed_rl.weights.update import WeightUpdate

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_checkpoint(store: WeightStore, directory: Path) -> Receipt:
    """Read the safetensors checkpoint in `directory` into the store, one tensor at a time, cast to its dtype.

    The store's first weights are then valid.

    Raises:
        ConfigError, WeightUpdateError: as `read_checkpoint`.
    """
    update = WeightUpdate(store, kind="loaded")
    named = read_checkpoint(update, directory)
    store.allocate()
    try:
        update.run(named)
        return update.commit()
    except BaseException:
        update.fail(f"the checkpoint in {directory} could not be read")
        raise


def read_checkpoint(update: WeightUpdate, directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Judge the safetensors checkpoint in `directory`, then read its (name, tensor) pairs one at a time.

    All headers are read and judged against `update` at the call, before anything is written: each weight of
    the model exactly once. Tensors are read, not mapped: a file that is cut short meanwhile is an error.

    Raises:
        ConfigError: the directory or its files are missing, damaged, quantised, or in another format.
        WeightUpdateError: the tensors don't fit the model: missing, unknown, mis-shaped, given twice.
    """
    if not directory.is_dir():
        raise ConfigError(
            "the checkpoint must be a directory", got=str(directory), fix="Pass the path of a saved model."
        )
    promised = entries(directory)
    targets = update.check_promised([(entry.name, entry.shape) for entry in promised])
    weights = [(entry, target) for entry, target in zip(promised, targets, strict=True) if target is not None]
    _check_floats([entry for entry, _ in weights])
    tied = {target.slot.name for _, target in weights if target.again}
    if tied:
        update.check_tied(list(_read([entry for entry, target in weights if target.slot.name in tied])))
    return _read([entry for entry, _ in weights])


def _read(found: Sequence[Entry]) -> Iterator[tuple[str, Tensor]]:
    for path, group in groupby(found, key=lambda entry: entry.shard):
        try:
            with path.open("rb") as file:
                for entry in group:
                    yield entry.name, _read_tensor(file, entry)
        except OSError as error:
            raise ConfigError(
                f"{path} could not be read: {error}", fix="Copy or download the file again."
            ) from error


def _read_tensor(file: BufferedReader, entry: Entry) -> Tensor:
    tensor = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype], device="cpu")
    raw = tensor.view(-1).view(torch.uint8).numpy()
    file.seek(entry.start)
    if file.readinto(raw.data) < raw.nbytes:
        raise OSError(f"it ends within {entry.name}")
    return tensor


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
