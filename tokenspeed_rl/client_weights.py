"""Everything about weights, for asyncio."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tokenspeed_rl.client_base import ClientBase, Reply, expect, on_thread
from tokenspeed_rl.core.waits import drive, drive_async
from tokenspeed_rl.core.weight_sync import Updated, WeightSync
from tokenspeed_rl.errors import EngineStateError, RequestError
from tokenspeed_rl.requests import (
    DestroyWeightsUpdateGroupReqInput,
    GetWeightsByNameReqInput,
    InitWeightsUpdateGroupReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
)
from tokenspeed_rl.sampling_params import check_integer
from tokenspeed_rl.weights import Receipt, SharedWeights, read_tensors
from tokenspeed_rl.weights.incoming import check_label


class WeightMembers(ClientBase):
    """A refused or failed update is answered with (False, why) and the error as `.report`; a done one has its
    Receipt there."""

    model_path: str
    served_model_name: str

    @property
    def sync(self) -> WeightSync:
        """Updates, for whoever drives one on a thread of its own."""
        self.check_alive()
        return self._core.sync

    async def update_weights_from_tensor(self, obj: UpdateWeightsFromTensorReqInput) -> tuple[bool, str]:
        """Copy weights out of tensors of this process, see `EngineClient`. An iterator runs on the awaiting
        event loop, whose other tasks go on between two tensors; all else is copied on a thread of its own."""

        async def update() -> Reply:
            sync, incoming = self.sync, read_tensors(expect(obj, UpdateWeightsFromTensorReqInput))
            if incoming.stream is not None:
                return done(await drive_async(sync.from_tensors(obj, incoming)))
            return done(await on_thread(lambda check: drive(sync.from_tensors(obj, incoming), check)))

        reply: tuple[bool, str] = await self._answer(update())
        return reply

    async def update_weights_from_distributed(
        self, obj: UpdateWeightsFromDistributedReqInput
    ) -> tuple[bool, str]:
        """Receive weights over a group, on a thread of its own."""
        sync = self.sync

        async def update() -> Reply:
            expect(obj, UpdateWeightsFromDistributedReqInput)
            return done(await on_thread(lambda check: drive(sync.from_group(obj, check), check)))

        reply: tuple[bool, str] = await self._answer(update())
        return reply

    async def update_weights_from_disk(self, obj: UpdateWeightFromDiskReqInput) -> tuple[bool, str, Any]:
        """Read a checkpoint, on a thread of its own; the third item counts the requests that re-prefill.
        `model_path` and `served_model_name` follow."""
        sync = self.sync

        async def update() -> Reply:
            expect(obj, UpdateWeightFromDiskReqInput)
            return await on_thread(
                lambda check: self.now_from(obj.model_path, drive(sync.from_disk(obj), check))
            )

        reply: tuple[bool, str, Any] = await self._answer(update(), 0)
        return reply

    def now_from(self, path: str, updated: Updated) -> Reply:
        """The model is the one at `path` since an update."""
        self.model_path = str(path)
        if self._core.config.served_model_name is None:
            self.served_model_name = self.model_path.rstrip("/").rpartition("/")[2]
        return Reply((*done(updated), updated.retracted), report=updated.receipt)

    async def init_weights_update_group(self, obj: InitWeightsUpdateGroupReqInput) -> tuple[bool, str]:
        """Join a sender's group, on a thread of its own."""
        sync = self.sync

        async def join() -> Reply:
            expect(obj, InitWeightsUpdateGroupReqInput)
            return await on_thread(lambda check: joined(sync, obj, check))

        reply: tuple[bool, str] = await self._answer(join())
        return reply

    async def destroy_weights_update_group(self, obj: DestroyWeightsUpdateGroupReqInput) -> tuple[bool, str]:
        """Leave a group."""
        sync = self.sync

        async def leave() -> Reply:
            expect(obj, DestroyWeightsUpdateGroupReqInput)
            return await on_thread(lambda check: left(sync, obj))

        reply: tuple[bool, str] = await self._answer(leave())
        return reply

    async def share_weights(self, module: nn.Module, version: str | None = None) -> Receipt:
        """Read the weights of the live `module` from now on (same architecture), and PEFT's LoRA adapters in
        it; requests in flight re-prefill, or under a pause that keeps go on with their KV. Those with an
        adapter that isn't there any more end with `abort`.

        Raises:
            ConfigError: the module can't be shared, by name. EngineStateError: a weight update is going on.
                Module and engine are as before.
        """
        check_label("version", version)
        core = self._core
        return await self._command(
            lambda: core.change_weights(lambda: core.source.share(module, version).receipt)
        )

    async def weights_changed(self, version: str | None = None) -> Receipt:
        """Tell the engine that the trainer wrote the shared weights in place: a complete update of 0 bytes,
        in every state, also asleep. Adapters that came, went, moved or were scaled since are seen now;
        requests in flight with one that went end with `abort`.

        Raises:
            EngineStateError: nothing is shared, or a weight update is going on. WeightsInvalidError,
                ConfigError: what is shared doesn't hold any more; the weights are invalid until
                `share_weights`.
        """
        check_label("version", version)
        core = self._core

        def change() -> Receipt:
            self.require_shared()
            return core.source.weights_changed(version)

        return await self._command(lambda: core.change_weights(change))

    def require_shared(self) -> SharedWeights:
        """The agreement with a module. Raises EngineStateError where nothing is shared."""
        self.check_alive()
        shared = self._core.source.shared
        if shared is None:
            raise EngineStateError(
                "no module is shared with this engine", fix="Call share_weights(module) first."
            )
        return shared

    async def get_weights_by_name(self, obj: GetWeightsByNameReqInput) -> Any:
        """The first `truncate_size` rows of a parameter by its Hugging Face name, as nested lists of
        floats. Fused names, tied names, wrappers' prefixes and PEFT's names of adapters are understood."""
        expect(obj, GetWeightsByNameReqInput)
        rows = check_integer("truncate_size", obj.truncate_size, low=0)

        def read() -> Any:
            self._core.life.require_readable()
            store = self._core.source.store
            found = store.find(obj.name) if isinstance(obj.name, str) else None
            if found is None:
                raise RequestError(
                    "no such parameter", got=obj.name, fix="Names are those of the Hugging Face model."
                )
            return torch.cat([part[:rows] for part in found])[:rows].float().tolist()

        return await self._command(read)

    async def weights_checksum(self) -> str:
        """Digest of the weights, as `tokenspeed_rl.weights.checksum` gives it for the same tensors."""

        def digest() -> str:
            self._core.life.require_readable()
            return self._core.source.store.checksum()

        return await self._command(digest)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) of every weight, ties once, then PEFT's names and tensors of adapters:
        the live weights themselves, not to be read after their release or the engine's end."""
        self.check_alive()
        self._core.life.require_readable()
        return self._core.source.store.parameters()


def done(updated: Updated) -> Reply:
    """The answer to an update that is in force."""
    receipt, count = updated.receipt, len(updated.receipt.loaded)
    wrote = f"{count} {'weight' if count == 1 else 'weights'} written, {receipt.bytes:,} bytes"
    now = f"version {receipt.version!r}" if updated.valid else f"invalid, {len(receipt.missing)} are missing"
    return Reply((True, f"{wrote}; the weights are {now}"), report=receipt)


def joined(
    sync: WeightSync, obj: InitWeightsUpdateGroupReqInput, check: Callable[[], None] = lambda: None
) -> Reply:
    """The answer once the group is joined."""
    sync.join(obj, check)
    return Reply((True, f"joined {obj.group_name!r}"))


def left(sync: WeightSync, obj: DestroyWeightsUpdateGroupReqInput) -> Reply:
    """The answer once the group is left."""
    sync.leave(obj)
    return Reply((True, f"left {obj.group_name!r}"))
