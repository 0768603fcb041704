"""Everything about weights, as an engine's blocking verbs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tokenspeed_rl.client_base import Reply, make_request
from tokenspeed_rl.client_weights import WeightMembers, done, joined, left
from tokenspeed_rl.core.waits import drive
from tokenspeed_rl.errors import EngineShutdownError
from tokenspeed_rl.llm import LLM
from tokenspeed_rl.requests import (
    DestroyWeightsUpdateGroupReqInput,
    GetWeightsByNameReqInput,
    InitWeightsUpdateGroupReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
)
from tokenspeed_rl.weights import Receipt, read_tensors, watch


class WeightVerbs:
    """`WeightMembers`, blocking; updates run on the calling thread. Where those answer False, these raise."""

    client: WeightMembers
    llm: LLM

    def update_weights_from_tensor(self, named_tensors: Any = None, **fields: Any) -> Reply:
        """Copy weights out of tensors of this process.

        Args:
            named_tensors: a mapping or list of (Hugging Face name, tensor), judged whole before the first
                write; an iterator, which runs on this thread and is judged as it comes; or a FlattenedBucket.
            fields: `weight_version` labels the new weights (None: the number of updates so far);
                `partial=True` with it makes this a piece of that version, which is valid once its pieces
                have brought every weight, and without it a change of some weights, complete in itself;
                `atomic=True` puts the old bytes back if it fails half-way; `timeout` in seconds, looked at
                between two tensors; `flush_cache=False` leaves old pages until they are needed;
                `serialized_named_tensors` is a list with the bytes of `safetensors.torch.save`.

        Returns:
            (True, message), with the Receipt as `.report`.

        Raises:
            RequestError: a field is not as documented. EngineStateError: asleep, shared, or another update is
                going on. WeightUpdateError: the tensors don't fit, or their iterator raised (chained).
                EngineTimeoutError. The message says what holds now.
        """
        obj = make_request(UpdateWeightsFromTensorReqInput, fields, named_tensors=named_tensors)
        return done(drive(self.client.sync.from_tensors(obj, read_tensors(obj))))

    def update_weights_from_distributed(
        self, names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]], **fields: Any
    ) -> Reply:
        """Receive the named weights over a group that was joined before; as `update_weights_from_tensor`."""
        named: dict[str, Any] = {"names": names, "dtype_names": dtype_names, "shapes": shapes}
        obj = make_request(UpdateWeightsFromDistributedReqInput, fields, **named)
        return done(drive(self.client.sync.from_group(obj)))

    def update_weights_from_disk(self, path: str, **fields: Any) -> Reply:
        """Read a safetensors checkpoint of the same architecture; as `update_weights_from_tensor`. `path` is
        the engine's `model_path` from then on."""
        obj = make_request(UpdateWeightFromDiskReqInput, fields, model_path=path)
        return self.client.now_from(path, drive(self.client.sync.from_disk(obj)))

    def init_weights_update_group(self, **fields: Any) -> Reply:
        """Join a weight sender's group within the timeout; fields of `InitWeightsUpdateGroupReqInput`."""
        return joined(self.client.sync, make_request(InitWeightsUpdateGroupReqInput, fields))

    def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> Reply:
        """Leave a group."""
        return left(self.client.sync, DestroyWeightsUpdateGroupReqInput(group_name=group_name))

    def share_weights(self, module: nn.Module) -> Receipt:
        """Read the weights of the live `module` from now on. See `AsyncLLM.share_weights`."""
        return self.llm.run(self.client.share_weights(module))

    def weights_changed(self, version: str | None = None) -> Receipt:
        """The trainer wrote the shared weights in place. See `AsyncLLM.weights_changed`."""
        return self.llm.run(self.client.weights_changed(version))

    def watch(self, optimizer: Any) -> RemovableHandle:
        """Call `weights_changed` after every step of `optimizer`, on its thread, until `remove()` of the
        handle or the end of the engine, which the trainer may well outlive.

        Raises:
            EngineStateError: nothing is shared, so that no step of a trainer's concerns this engine.
        """

        def changed() -> None:
            with suppress(EngineShutdownError):
                self.weights_changed()

        self.client.require_shared()
        return watch(optimizer, changed)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) of every weight, ties once: the live weights themselves, not to be
        written, nor read after their release."""
        return self.client.named_parameters()

    def weights_checksum(self) -> str:
        """Digest of the weights, as `tokenspeed_rl.weights.checksum` gives it for the same tensors."""
        return self.llm.run(self.client.weights_checksum())

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> Any:
        """The first rows of a parameter as nested lists of floats."""
        obj = GetWeightsByNameReqInput(name=name, truncate_size=truncate_size)
        return self.llm.run(self.client.get_weights_by_name(obj))
