"""Running a weight update: written on the caller's thread, between two steps of the loop's."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from tokenspeed_rl.core.engine_loop import EngineLoop
from tokenspeed_rl.core.life_cycle import LifeCycle
from tokenspeed_rl.core.model_source import ModelSource
from tokenspeed_rl.core.waits import Waits, go_on
from tokenspeed_rl.errors import (
    EngineStateError,
    EngineTimeoutError,
    RequestError,
    TokenSpeedError,
    WeightUpdateError,
)
from tokenspeed_rl.models import spec_from_config
from tokenspeed_rl.requests import (
    DestroyWeightsUpdateGroupReqInput,
    InitWeightsUpdateGroupReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
)
from tokenspeed_rl.weights import Receipt, find_model, read_config
from tokenspeed_rl.weights.checkpoint import read_checkpoint
from tokenspeed_rl.weights.incoming import Incoming, check_update
from tokenspeed_rl.weights.transport.groups import Groups
from tokenspeed_rl.weights.transport.promise import read_promise
from tokenspeed_rl.weights.update import WeightUpdate

Named = tuple[str, Tensor]


class Terms(NamedTuple):
    """How an update is to be done; fields as those of the protocol's structs."""

    kind: str
    label: str | None = None
    partial: bool = False
    atomic: bool = False
    flush: bool = True
    timeout: float | None = None
    whole: bool = False
    """It was judged whole: nothing interrupts it once it has begun to write."""


class Updated(NamedTuple):
    """What an update did."""

    receipt: Receipt
    retracted: int
    """Requests in flight that compute their KV again."""
    valid: bool
    """Whether the weights are a complete set now."""


def _terms(kind: str, obj: UpdateWeightsFromTensorReqInput | UpdateWeightsFromDistributedReqInput) -> Terms:
    return Terms(kind, obj.weight_version, obj.partial, obj.atomic, obj.flush_cache, obj.timeout)


class WeightSync:
    """Updates of weights that the engine owns."""

    def __init__(
        self,
        loop: EngineLoop,
        life: LifeCycle,
        source: ModelSource,
        closing: threading.Lock,
        log: logging.Logger,
    ) -> None:
        """`closing` is held while the store's memory is given up for good."""
        self._loop = loop
        self._life = life
        self._source = source
        self._store = source.store
        self._closing = closing
        self._log = log
        self.groups = Groups()

    def from_tensors(self, obj: UpdateWeightsFromTensorReqInput, incoming: Incoming) -> Waits[Updated]:
        """What `read_tensors(obj)` gave: whole sets are judged before the first write, an iterator's pairs as
        they come."""

        def source(update: WeightUpdate) -> Iterable[Named]:
            if incoming.whole is None:
                assert incoming.stream is not None
                return incoming.stream
            update.check_whole(incoming.whole)
            return incoming.whole

        return self.update(_terms("tensor", obj)._replace(whole=incoming.whole is not None), source)

    def from_disk(self, obj: UpdateWeightFromDiskReqInput) -> Waits[Updated]:
        """All files' headers are judged before the first write, as is the config beside them."""
        check_update(obj)
        if obj.load_format not in (None, "auto", "safetensors"):
            raise RequestError(
                "load_format must be None, auto or safetensors", got=obj.load_format, fix="Leave it out."
            )
        if not isinstance(obj.model_path, str | Path):
            raise RequestError("model_path must be a path or a hub id", got=obj.model_path)
        directory = find_model(obj.model_path)
        self._check_architecture(directory)
        terms = Terms("disk", obj.weight_version, flush=obj.flush_cache, whole=True)
        return self.update(terms, lambda update: read_checkpoint(update, directory))

    def from_group(
        self, obj: UpdateWeightsFromDistributedReqInput, interrupted: Callable[[], None] = go_on
    ) -> Waits[Updated]:
        """Names and shapes are judged before anything is received. However it ends, the sender is told.

        `interrupted` is called at every wait for the sender, and ends it by raising.
        """
        group = self.groups.get(obj.group_name)
        try:
            expected = read_promise(obj)
        except RequestError as error:
            group.refuse(error, 1.0)  # for a sender that waits already
            raise
        receiving = False

        def source(update: WeightUpdate) -> Iterable[Named]:
            nonlocal receiving
            update.check_promised([(name, shape) for name, _, shape in expected])
            receiving = True
            buckets = obj.load_format is not None
            return group.receive(
                expected, flattened=buckets, timeout=obj.timeout, check=self._alert(interrupted)
            )

        try:
            updated = yield from self.update(_terms("distributed", obj), source)
        except BaseException as error:
            if receiving:
                group.acknowledge(error)
            else:
                group.refuse(error, obj.timeout)
            raise
        group.acknowledge(None)
        return updated

    def join(self, obj: InitWeightsUpdateGroupReqInput, interrupted: Callable[[], None] = go_on) -> None:
        """Join a sender's group; as `from_group`, this waits on the caller's thread."""

        self.groups.init(obj, device=self._store.device, check=self._alert(interrupted))

    def leave(self, obj: DestroyWeightsUpdateGroupReqInput) -> None:
        """Leave a group; a transfer under way in it fails."""
        self.groups.destroy(obj.group_name)

    def update(self, terms: Terms, source: Callable[[WeightUpdate], Iterable[Named]]) -> Waits[Updated]:
        """Write what `source` yields, having judged as much of it as it knows beforehand.

        Raises:
            EngineStateError: asleep, shared, another update; nothing was written. WeightUpdateError,
                EngineTimeoutError: the message says what holds now. Whatever interrupts the caller.
        """
        began, owner = time.monotonic(), object()
        update: WeightUpdate | None = None
        try:
            yield self._loop.call(lambda: self._claim(owner))
            update = WeightUpdate(
                self._store, kind=terms.kind, label=terms.label, partial=terms.partial, atomic=terms.atomic
            )
            yield from self._write(update, source(update), began, terms)
            commit = partial(self._commit, update, owner, flush=terms.flush)
            updated: Updated = yield self._loop.call(commit)
            return updated
        except GeneratorExit as error:  # nobody drives this any more
            with suppress(TokenSpeedError):  # nor is there anything left to be undone
                self._loop.call(partial(self._give_up, update, owner, error))
            raise
        except BaseException as error:
            holds = yield self._loop.call(partial(self._give_up, update, owner, error))
            if holds and isinstance(error, TokenSpeedError):
                error.what = f"{error.what.rstrip('.')}; {holds}"
            raise

    def _write(self, update: WeightUpdate, named: Iterable[Named], began: float, terms: Terms) -> Waits[None]:
        iterator, stopped = iter(named), False
        item: Named | None = None
        try:
            while (item := self._next(iterator, terms)) is not None:
                stoppable = not (terms.whole and stopped)
                if stoppable and terms.timeout is not None and time.monotonic() - began > terms.timeout:
                    raise EngineTimeoutError(f"the weight update was not done after {terms.timeout} s")
                target = update.claim(*item)
                if target is None:
                    self._loop.check_alive()
                else:
                    if not stopped:
                        yield self._loop.call(self._stop_steps)
                        stopped = True
                    with self._closing:
                        self._loop.check_alive()
                        update.write(target, item[1])
                item = None
                if stoppable:
                    yield None
        finally:
            item = None  # an error's traceback holds this frame, which is to hold no tensor
            del named, iterator

    def _next(self, iterator: Iterator[Named], terms: Terms) -> Named | None:
        if terms.whole or terms.kind != "tensor":  # the engine's own iterators say what is wrong themselves
            return next(iterator, None)
        try:
            with self._life.slot.iterating():
                return next(iterator, None)
        except WeightUpdateError as error:
            if error.__cause__ is None and error.__context__ is None:
                raise  # what it gave is no pair
            raise _chained(error) from error
        except (Exception, GeneratorExit) as error:  # the latter is how an abandoned update ends, not this
            raise _chained(error) from error

    def _alert(self, interrupted: Callable[[], None]) -> Callable[[], None]:
        """What a wait for a peer asks again and again: whether to go on."""

        def check() -> None:
            interrupted()
            self._loop.check_alive()

        return check

    def _check_architecture(self, directory: Path) -> None:
        """The numbers that names and shapes don't show, such as the rotary base, must be this model's too."""
        if not (directory / "config.json").is_file():
            return
        wrong = self._source.spec.differences(spec_from_config(read_config(directory)))
        if wrong:
            raise WeightUpdateError(
                f"{directory} holds another model: {'; '.join(wrong[:3])}; nothing was written",
                fix="Update from a checkpoint of the model that the engine was made with.",
            )

    # On the loop's thread

    def _claim(self, owner: object) -> None:
        self._life.residency.require("weights")
        if not self._store.owned:
            raise EngineStateError(
                "the weights are a module's, shared with this engine, so there is nothing to copy them to",
                fix="Write the module's parameters and call weights_changed().",
            )
        self._life.slot.claim(owner)

    def _stop_steps(self) -> None:
        self._life.slot.writing = True

    def _commit(self, update: WeightUpdate, owner: object, *, flush: bool) -> Updated:
        epoch, running = self._store.version.epoch, self._loop.scheduler.running
        before = len(running)
        receipt = update.commit()
        if self._store.version.epoch != epoch:
            self._life.weights_committed(flush=flush)
        self._life.slot.end(owner)
        self._log.info("weights are version %r: %d bytes copied", receipt.version, receipt.bytes)
        return Updated(receipt, before - len(running), self._store.version.valid)

    def _give_up(self, update: WeightUpdate | None, owner: object, error: BaseException) -> str:
        """Undo or invalidate; what holds now, in words. Nothing if it never began, or is committed."""
        if not self._life.slot.end(owner) or update is None:
            return ""
        wrote = update.wrote
        update.fail(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        if not wrote:
            return "nothing was written"
        if not update.atomic:
            return "the weights are invalid until a complete update"
        still = "" if self._store.version.valid else ", and the weights are as invalid as before"
        return f"what it had overwritten was put back{still}"


def _chained(error: BaseException) -> WeightUpdateError:
    text = f"{type(error).__name__}: {error}".rstrip(".")
    return WeightUpdateError(f"the source of the named tensors raised {text}")
