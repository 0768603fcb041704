"""Engines over a poisoning memory, updates by every path, and what an engine looks like from outside."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.core import model_source
from tokenspeed_rl.errors import TokenSpeedError
from tokenspeed_rl.memory import FakeVMM
from tokenspeed_rl.requests import UpdateWeightFromDiskReqInput, UpdateWeightsFromTensorReqInput
from tokenspeed_rl.weights import Receipt, flatten

PROMPT = Tiny.prompt(21)
PATHS = ("mapping", "list", "iterator", "bucket", "bytes", "disk")
WHOLE = ("mapping", "list", "bucket", "bytes", "disk")
HOW = ("engine", "async")
MiB = 1 << 20


class Rig(NamedTuple):
    """An engine whose every region is one of `vmm`'s; ops of its loop on unmapped memory raise."""

    engine: Engine
    vmm: FakeVMM

    @property
    def kv(self) -> Any:
        """The pages."""
        return self.engine.client._core.kv

    @property
    def capacity(self) -> int:
        """Most tokens of a request."""
        found = self.engine.client._core.capacity()
        assert found is not None
        return found

    def addresses(self) -> dict[str, int]:
        """Where every weight and every layer's pages are; all tags are resident."""
        places = {name: tensor.data_ptr() for name, tensor in self.engine.named_parameters()}
        pages = {f"k{i}": k.data_ptr() for i, k in enumerate(self.kv.k)}
        return places | pages | {f"v{i}": v.data_ptr() for i, v in enumerate(self.kv.v)}


def rig(
    make_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    model: Any,
    capacity: int = 64 * MiB,
    **options: Any,
) -> Rig:
    """An engine on a device of `capacity` bytes: own weights, those of `model`; or `share=True`."""
    vmm, share = FakeVMM(capacity), options.pop("share", False)
    with monkeypatch.context() as patch:
        patch.setattr(model_source, "memory_for", lambda device: vmm)
        engine = make_engine(model if share else model.config, page_size=4, **options)
    engine.client._core.loop.call(vmm.guard().__enter__).result()
    if not share:
        engine.update_weights_from_tensor(weights_of(model), weight_version="W0")
    return Rig(engine, vmm)


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """By Hugging Face name, ties once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def parcel(path: str, weights: Any) -> dict[str, Any]:
    """The fields by which `weights` travel on a path that isn't the disk."""
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    if path == "bytes":
        return {
            "serialized_named_tensors": [save({name: tensor.contiguous().clone() for name, tensor in pairs})]
        }
    if path == "bucket":
        return {"named_tensors": flatten(pairs), "load_format": "flattened_bucket"}
    forms: dict[str, Callable[[Iterable[Any]], Any]] = {"mapping": dict, "list": list, "iterator": iter}
    return {"named_tensors": forms[path](pairs)}


def update(engine: Engine, how: str, path: str, weights: Any, **fields: Any) -> Receipt | TokenSpeedError:
    """Update by a path through `Engine` or `AsyncLLM`; the receipt, or the refusal. `weights`: named tensors,
    for the disk a directory."""
    if how == "engine":
        try:
            if path == "disk":
                reply = engine.update_weights_from_disk(str(weights), **fields)
            else:
                reply = engine.update_weights_from_tensor(**parcel(path, weights), **fields)
        except TokenSpeedError as error:
            return error
    elif path == "disk":
        disk = UpdateWeightFromDiskReqInput(model_path=str(weights), **fields)
        reply = asyncio.run(engine.client.update_weights_from_disk(disk))
    else:
        tensors = UpdateWeightsFromTensorReqInput(**parcel(path, weights), **fields)
        reply = asyncio.run(engine.client.update_weights_from_tensor(tensors))
    assert len(reply) == (3 if path == "disk" else 2)
    report: Receipt | TokenSpeedError = reply.report
    assert reply[0] is isinstance(report, Receipt)
    if isinstance(report, TokenSpeedError):
        assert reply[1] == str(report) == Tiny.state(engine)["last_refusal"]
    return report


@dataclasses.dataclass(frozen=True)
class Looks:
    """What tells weights apart: computed anew, bit for bit."""

    output: tuple[int, ...]
    logprobs: tuple[float, ...]
    checksum: str


def looks(engine: Engine, prompt: list[int] = PROMPT) -> Looks:
    """Greedy output without anything cached, and the weights' digest."""
    engine.flush_cache()
    result = engine.generate(
        input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 6}, return_logprob=True
    )
    assert result["meta_info"]["cached_tokens"] == 0
    values = [value for value, _, _ in result["meta_info"]["output_token_logprobs"]]
    return Looks(tuple(result["output_ids"]), tuple(values), engine.weights_checksum())


def version(engine: Engine) -> tuple[Any, ...]:
    """The weights' identity, label and validity, and what the model is called."""
    state, client = Tiny.state(engine), engine.client
    keys = ("weight_epoch", "weight_version", "validity")
    return (*(state[key] for key in keys), client.model_path, client.served_model_name)


def exact(
    model: PreTrainedModel, engine: Engine, prompt: list[int] = PROMPT, cached: int | None = None
) -> float:
    """Largest gap of drawn tokens' logprobs from a full recompute by `model`."""
    result = engine.generate(
        input_ids=prompt, sampling_params={"max_new_tokens": 8, "seed": 1}, return_logprob=True
    )
    if cached is not None:
        assert result["meta_info"]["cached_tokens"] == cached
    return Tiny.gap(model, prompt, result)


def save_model(model: PreTrainedModel, directory: Path, **options: Any) -> Path:
    """`model` as a checkpoint in `directory`."""
    model.save_pretrained(directory, **options)
    return directory
