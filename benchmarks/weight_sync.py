"""What does an update of the weights cost? SmolLM2-135M in float32, every path, against a plain copy.

    python benchmarks/weight_sync.py [--rounds 5] [--threads 2] [--model smollm2|tiny]

The peer is `copy_` of every parameter into a tensor in memory of the same kind, in the same process: what any
engine that keeps weights of its own must at least do. Every round runs the peer and all paths once, in turn.
First every path is run alone, from other weights, and the engine's checksum compared with the trainer's.

The extra memory of a path is its peak: the process's high-water mark (VmHWM, reset through clear_refs) less
what it held before, and less mapped files, measured in the first run; of two processes, the engine's. A
bucket or bytes that exist before the call count as the trainer's. "64 MB buckets" are flattened one by one,
within the time that is measured; the largest parameter, which has a bucket of its own, is larger than that.
"""

import ctypes
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import arguments, describe, model_directory, table
from safetensors.torch import save
from torch import Tensor
from transformers import AutoModelForCausalLM

from tokenspeed_rl import Engine
from tokenspeed_rl.memory import HostMemory
from tokenspeed_rl.recipes.memory import held, peak, reset_peak
from tokenspeed_rl.weights import WeightsSender, buckets, checksum, flatten

BUCKET = 64 << 20
ALIGNMENT = 256
HOST, GROUP, BACKEND, PATIENCE = "127.0.0.1", "benchmark", "gloo", 120.0
Update = Callable[[], Any]
"""Runs one update and returns its receipt."""


@dataclass
class Copied:
    """What stands for a receipt of the peer."""

    bytes: int


def plain_copy(named: Mapping[str, Tensor]) -> Update:
    """`copy_` into tensors that lie as an engine's own do."""
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in named.values()]
    region = HostMemory().reserve("weights", sum(sizes))
    region.map(sum(sizes))
    places = region.bytes[0][: sum(sizes)].split(sizes)
    pairs = [
        (place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape), tensor)
        for place, tensor in zip(places, named.values(), strict=True)
    ]

    def copy() -> Copied:
        for place, tensor in pairs:
            place.copy_(tensor)
        return Copied(sum(tensor.nbytes for tensor in named.values()))

    copy()  # the first touch takes the memory
    return copy


def in_buckets(engine: Engine, named: Mapping[str, Tensor]) -> Any:
    """Bucket after bucket, each made when the one before is gone; the receipt of the last, for all."""
    total = 0
    for bucket in buckets(named, BUCKET):
        receipt = engine.update_weights_from_tensor(bucket, partial=True, weight_version="bucketed").report
        total += receipt.bytes
        del bucket
    receipt.bytes = total
    return receipt


def send(directory: str, channel: Any) -> None:
    """The trainer's process: sends its weights whenever it is told to."""
    torch.set_num_threads(1)
    named = dict(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).named_parameters())
    with WeightsSender(HOST, 0, 2, GROUP, BACKEND, PATIENCE) as sender:
        channel.send(sender.master_port)
        while channel.recv():
            sender.send(named)


@contextmanager
def two_processes(
    directory: Path, engine: Engine, named: Mapping[str, Tensor]
) -> Iterator[dict[str, Update]]:
    """Both formats of a transfer from a process of its own."""
    context = multiprocessing.get_context("spawn")
    channel, end = context.Pipe()
    trainer = context.Process(target=send, args=(str(directory), end), daemon=True)
    trainer.start()
    engine.init_weights_update_group(
        master_address=HOST,
        master_port=channel.recv(),
        rank_offset=1,
        world_size=2,
        group_name=GROUP,
        backend=BACKEND,
        timeout=PATIENCE,
    )

    def receive(load_format: str | None) -> Any:
        channel.send(True)
        return engine.update_weights_from_distributed(
            list(named),
            ["float32"] * len(named),
            [list(tensor.shape) for tensor in named.values()],
            group_name=GROUP,
            load_format=load_format,
            timeout=PATIENCE,
        ).report

    try:
        yield {
            "two processes, gloo, tensor by tensor": lambda: receive(None),
            "two processes, gloo, flattened buckets": lambda: receive("flattened_bucket"),
        }
    finally:
        channel.send(False)
        trainer.join(PATIENCE)


def check(updates: Mapping[str, Update], engine: Engine, named: Mapping[str, Tensor]) -> dict[str, int]:
    """Every path, from weights that are all 0, ends with the trainer's bits. Returns its extra bytes."""
    expected, extra = checksum(named), {}
    for name, update in updates.items():
        if not name.startswith("shared"):
            engine.update_weights_from_tensor((key, torch.zeros_like(t)) for key, t in named.items())
        ctypes.CDLL(None).malloc_trim(0)  # else what is free in the heap already would count for nothing
        reset_peak()
        before = held()
        receipt = update()
        extra[name] = max(0, peak() - before)
        assert receipt.checksum == expected, f"{name}: the engine holds other weights than the trainer"
        assert not receipt.missing and receipt.version != "invalid", name
    return extra


def measure(updates: Mapping[str, Update], rounds: int) -> tuple[dict[str, float], dict[str, int]]:
    """Of each, the median of its seconds, and the bytes that one update copied."""
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    copied: dict[str, int] = {}
    for _ in range(rounds):
        for name, update in updates.items():
            began = time.perf_counter()
            receipt = update()
            seconds[name].append(time.perf_counter() - began)
            copied[name] = receipt.bytes
    return {name: median(values) for name, values in seconds.items()}, copied


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        directory = model_directory(args.model, Path(scratch))
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        named = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        bucket, raw = flatten(named), save(named)
        with (
            Engine(str(directory)) as engine,
            Engine(model) as sharing,
            two_processes(directory, engine, named) as distributed,
        ):
            tensor = engine.update_weights_from_tensor
            updates: dict[str, Update] = {
                "shared": sharing.weights_changed,
                "tensors, mapping": lambda: tensor(named).report,
                "tensors, iterator": lambda: tensor(iter(named.items())).report,
                "tensors, iterator, atomic": lambda: tensor(iter(named.items()), atomic=True).report,
                "one flattened bucket": lambda: tensor(bucket, load_format="flattened_bucket").report,
                "64 MB buckets": lambda: in_buckets(engine, named),
                "safetensors bytes": lambda: tensor(serialized_named_tensors=[raw]).report,
                **distributed,
                "disk": lambda: engine.update_weights_from_disk(str(directory)).report,
            }
            extra = {"copy_": 0, **check(updates, engine, named)}
            seconds, copied = measure({"copy_": plain_copy(named), **updates}, args.rounds)
    print(describe(args.threads))
    print(f"{len(named)} parameters, median of {args.rounds} rounds; checksums agree on every path")
    rows = [
        [
            name,
            f"{s * 1e3:,.1f}",
            f"{copied[name]:,}",
            f"{s / seconds['copy_']:.2f}x",
            f"{extra[name] / 1e6:,.0f}",
        ]
        for name, s in seconds.items()
    ]
    print(table(["path", "ms", "bytes copied", "of copy_", "extra MB at the peak"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
