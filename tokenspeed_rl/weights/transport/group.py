"""The engine's end of a weight group: joins a sender's rendezvous and receives its weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from tokenspeed_rl.errors import EngineStateError, EngineTimeoutError, RequestError, WeightUpdateError
from tokenspeed_rl.sampling_params import check_integer
from tokenspeed_rl.weights.transport.framing import Broadcast, receive_buckets, receive_plain
from tokenspeed_rl.weights.transport.handshake import GREETING, PROTOCOL, Expected, ReceiverDesk
from tokenspeed_rl.weights.transport.mesh import Mesh, MeshMaker, check_backend
from tokenspeed_rl.weights.transport.rendezvous import (
    Deadline,
    Line,
    Place,
    Pulse,
    connect,
    quietly,
    seldom,
    uncancelled,
)

_AGAIN = "Call init_weights_update_group again."
_GLOO_KEY = "/0/0"
"""How the key ends that rank 0 of any gloo group writes first."""
_PATIENCE = 5.0
"""Seconds after which a store that doesn't answer counts as gone."""
_GREETING_SECONDS = 1.0
"""A `WeightsSender` greets as soon as its store is up."""


class WeightsGroup:
    """A receiver's place in a weight group. It is usable as soon as the sender exists.

    Rank 0 is a `WeightsSender`, or a plain torch group made by hand, from which tensors are received without
    buckets and without any agreement beforehand (what it sends must then be exactly what is expected; gloo
    ends this process if a tensor is larger)::

        store = TCPStore(master_address, master_port, is_master=True, wait_for_workers=False)
        group = ProcessGroupGloo(PrefixStore(group_name, store), 0, world_size)  # or ProcessGroupNCCL
        group.broadcast([tensor], options).wait()  # per name, in order

    Groups made by a copy of torch's `init_process_group` under that name are found as well (gloo). No process
    group is registered, the default one is never touched.

    NCCL, which nobody has run this over yet: torch's watchdog ends a process whose peer dies, unless
    TORCH_NCCL_ASYNC_ERROR_HANDLING=0 was set before it joined; no option of the backend does the same.

    One transfer at a time; any thread. Only `close` may be called during one, which fails it, and in a forked
    child, where it changes nothing.

    Args:
        master_address, master_port: where the sender's rendezvous store listens.
        rank: 1 .. world_size - 1.
        backend: as the sender's.
        timeout: seconds to wait for the sender's store and group.
        device: of the engine. Tensors arrive there with NCCL, in host memory with gloo.
        check: called every few hundredths of a second while waiting; what it raises ends the wait.

    Attributes:
        broken: why nothing can be received any more; None as long as it can.

    Raises:
        RequestError: arguments that can't be used here, or that differ from the sender's.
        EngineTimeoutError: nobody, or no group of that name, was there within the timeout.
    """

    def __init__(
        self,
        master_address: str,
        master_port: int,
        rank: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: str = "nccl",
        timeout: float = 60.0,
        device: torch.device | str = "cpu",
        check: Callable[[], None] = uncancelled,
    ) -> None:
        check_integer("master_port", master_port, low=1, high=65535)
        self._place = Place(master_address, master_port, group_name, rank, world_size)
        self._place.check(timeout)
        check_integer("rank", rank, low=1)
        check_backend(backend, torch.device(device))
        self._backend = backend
        self.broken: str | None = None
        self._mesh: tuple[int, Mesh] | None = None
        self._transfer: int | None = None
        self._unread = False  # a transfer has begun, and not everything has come
        deadline = Deadline(timeout)
        store, _ = connect(self._place, deadline, check)
        self._maker = MeshMaker(self._place, backend, torch.device(device), deadline, check)
        self._line = Line(store, self._place.where, patience=min(_PATIENCE, timeout))
        self._desk: ReceiverDesk | None = None
        if self._find(deadline, check):
            self._line = Line(store, self._place.where, group_name, self._line.patience)
            self._desk = ReceiverDesk(self._line, rank)

    def _find(self, deadline: Deadline, check: Callable[[], None]) -> bool:
        """Whether rank 0 is a `WeightsSender`; if it isn't, connect to it."""
        name, grace = self._place.group_name, Deadline(_GREETING_SECONDS)

        def missing() -> str:
            others = sorted({key.partition("/")[0] for key in self._line.list_keys()} - {"init", ""})
            found = f"; there is {', '.join(others)}" if others else ""
            return f"rank 0 of the weight group {name!r} didn't appear at {self._place.where}{found}"

        pulse = Pulse(deadline, check, missing)
        while True:
            greeting = self._line.get(GREETING)
            if greeting is not None:
                self._compare(json.loads(greeting))
                return True
            if self._backend == "nccl" and grace.left <= 0:  # NCCL's rank 0 writes nothing until it sends
                prefixes = [name]
            else:
                keys = [key for key in self._line.list_keys() if key.startswith(f"{name}/")]
                prefixes = [key.removesuffix(_GLOO_KEY) for key in keys if key.endswith(_GLOO_KEY)]
            if prefixes:
                self._connect(0, prefixes[0], deadline, check)
                return False
            pulse.beat()

    def _connect(self, number: int, prefix: str, deadline: Deadline, check: Callable[[], None]) -> None:
        self._mesh = (number, self._maker.form(prefix, deadline, check))

    def _compare(self, sender: dict[str, object]) -> None:
        own = {
            "group_name": self._place.group_name,
            "world_size": self._place.world_size,
            "backend": self._backend,
            "protocol": PROTOCOL,
        }
        for field, value in own.items():
            if sender.get(field) != value:
                raise RequestError(
                    f"{field} must be {sender.get(field)!r}, as for the sender at {self._place.where}",
                    got=value,
                    fix="Pass the same at both ends.",
                )

    def receive(
        self,
        expected: Sequence[tuple[str, torch.dtype, Sequence[int]]],
        *,
        flattened: bool,
        timeout: float,
        check: Callable[[], None] = uncancelled,
    ) -> Iterator[tuple[str, Tensor]]:
        """Receive one update; what can't be is refused at once, nothing else happens before the first `next`.

        The caller calls `acknowledge` when it is done with the tensors, or failed. What is raised from here
        has been told to the sender.

        Args:
            expected: (Hugging Face name, dtype, shape) of every tensor; the sender compares its own with it.
            flattened: in buckets, in any order; else one by one, in this order.
            timeout: seconds for all of it.
            check: polled during every wait; what it raises ends the transfer.

        Yields:
            (name, tensor): contiguous, valid until the next step, to be copied and not kept.

        Raises:
            EngineTimeoutError: the sender didn't come, or didn't finish.
            WeightUpdateError: it has other tensors, gave up (with its reason), broke off, or sent something
                else; or the group was closed meanwhile. It can be used again unless `broken` says why not.
            EngineStateError: the group is broken or closed; nothing was received.
        """
        self._refuse_if_broken()
        if flattened and self._desk is None:
            raise WeightUpdateError(
                "the group's rank 0 is no WeightsSender, and buckets need one", fix="Pass load_format=None."
            )
        promised = [Expected(name, dtype, tuple(shape)) for name, dtype, shape in expected]
        return self._receive(promised, flattened, timeout, check)

    def _receive(
        self, promised: list[Expected], flattened: bool, timeout: float, check: Callable[[], None]
    ) -> Iterator[tuple[str, Tensor]]:
        self._line.patience = min(_PATIENCE, timeout)
        deadline = Deadline(timeout)
        self.acknowledge(None)  # of a transfer that was left alone
        try:
            self._unread = True
            broadcast, device = self._agree(promised, flattened, deadline, check)
            read = receive_buckets if flattened else receive_plain
            yield from read(promised, device, broadcast)
            self._unread = False
        except BaseException as error:
            failure = self._failed(error)
            if failure is error:
                raise
            raise failure from error

    def _agree(
        self, promised: list[Expected], flattened: bool, deadline: Deadline, check: Callable[[], None]
    ) -> tuple[Broadcast, torch.device]:
        """Make the connections ready for one transfer; how to receive on them, and where."""
        alert = self._open(check)
        if self._desk is not None:
            held = self._mesh[0] if self._mesh else None
            go = self._desk.offer(promised, flattened, held, deadline, alert)
            self._transfer = go.transfer
            alert = self._alert(self._desk, go.transfer, alert)
            if self._mesh is None or self._mesh[0] != go.mesh:
                self._drop_mesh()
                self._connect(go.mesh, f"{self._place.group_name}/mesh/{go.mesh}", deadline, alert)
        now = self._mesh
        if now is None:
            raise self._left()
        mesh = now[1]
        return partial(mesh.broadcast, deadline=deadline, check=alert), mesh.device

    def _open(self, check: Callable[[], None]) -> Callable[[], None]:
        def both() -> None:
            check()
            if self.broken is not None:
                raise self._left()

        return both

    def _left(self) -> WeightUpdateError:
        what = f"the weight group {self._place.group_name!r} can't be used any more: {self.broken}"
        return WeightUpdateError(what, fix=_AGAIN)

    def _alert(self, desk: ReceiverDesk, transfer: int, check: Callable[[], None]) -> Callable[[], None]:
        def ask() -> None:
            reason = desk.stopped(transfer)
            if reason is not None:
                raise WeightUpdateError(f"the sender gave up: {reason}")

        ask_seldom = seldom(ask)

        def look() -> None:
            check()
            ask_seldom()

        return look

    def _failed(self, error: BaseException) -> BaseException:
        """Clean up after a failed transfer; the error to raise, with the sender's reason if it gave one."""
        if self._desk is None:
            self._break(f"a transfer failed: {error!r}")
        elif isinstance(error, WeightUpdateError | EngineTimeoutError):
            error = self._explained(self._desk, error)
        if not isinstance(error, GeneratorExit):  # the caller stopped, and says why by `acknowledge`
            self.acknowledge(error)
        return error

    def _explained(
        self, desk: ReceiverDesk, error: WeightUpdateError | EngineTimeoutError
    ) -> WeightUpdateError | EngineTimeoutError:
        try:
            told = desk.stopped(self._transfer or 0)
        except WeightUpdateError:
            self._break(f"its sender at {self._place.where} is gone")
            return WeightUpdateError(f"the sender at {self._place.where} is gone: {error.what}", fix=_AGAIN)
        if told is None or told in error.what:
            return error
        return WeightUpdateError(f"the sender gave up: {told}")

    def acknowledge(self, error: BaseException | None) -> None:
        """End a transfer: let the sender's `send` return, or raise with this error. The first word counts.

        A sender that is gone meanwhile is no error here. Without a transfer: nothing.
        """
        transfer, self._transfer = self._transfer, None
        if self._unread and error is None:
            error = WeightUpdateError("the receiver stopped before the last tensor")
        if transfer is not None and self._desk is not None:
            quietly(partial(self._desk.acknowledge, transfer, error))
        unread, self._unread = self._unread, False
        if unread or self.broken is not None:
            self._drop_mesh()  # something may be on its way; the sender knows by now

    def refuse(self, error: BaseException, timeout: float) -> None:
        """Tell the `send` that waits, or comes within `timeout` seconds, why nothing is received."""
        busy = self._unread or self._transfer is not None  # with another update, which goes on
        if self._desk is not None and self.broken is None and not busy:
            quietly(partial(self._desk.refuse, f"{type(error).__name__}: {error}", timeout))

    def alive(self) -> bool:
        """Whether the sender's store answers; may take a few seconds to say no."""
        if self.broken is None and not self._line.alive():
            self._break(f"its sender at {self._place.where} is gone")
        return self.broken is None

    def close(self) -> None:
        """Leave the group; a transfer under way fails. Returns at once. Any number of times."""
        self._break("it was closed")
        if self._transfer is None and not self._unread:  # else `acknowledge` does, once the sender knows why
            self._drop_mesh()

    def _break(self, reason: str) -> None:
        self.broken = self.broken or reason

    def _drop_mesh(self) -> None:
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            mesh[1].close()

    def _refuse_if_broken(self) -> None:
        if self.broken is not None:
            raise EngineStateError(
                f"the weight group {self._place.group_name!r} can't be used: {self.broken}", fix=_AGAIN
            )
