"""The trainer's end of a weight update, for a trainer in other processes than the engine."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from types import TracebackType

import torch
from torch import Tensor

from tokenspeed_rl.errors import EngineStateError, RequestError, TokenSpeedError, WeightUpdateError
from tokenspeed_rl.sampling_params import check_integer
from tokenspeed_rl.weights.plain import check_pair
from tokenspeed_rl.weights.transport.framing import checked, in_order, mismatch, send_buckets, send_plain
from tokenspeed_rl.weights.transport.handshake import GREETING, PROTOCOL, Go, Offer, SenderDesk
from tokenspeed_rl.weights.transport.mesh import Mesh, MeshMaker, check_backend
from tokenspeed_rl.weights.transport.rendezvous import Deadline, Line, Place, host, seldom, uncancelled

BUCKET_BYTES = 256 << 20


class WeightsSender:
    """Rank 0 of a weight group: hosts its rendezvous, and sends weights to the engines that joined.

    Construction returns at once; receivers join when they like, and again after a crash. It listens on
    `master_address` alone and touches neither the default process group nor the environment. `send` and
    `close` may be called from any thread; sends wait for one another. A forked child may only close it, which
    changes nothing in the parent.

    NCCL, which nobody has run this over yet: torch's watchdog ends a process whose peer dies, unless
    TORCH_NCCL_ASYNC_ERROR_HANDLING=0 was set before the first `send`; no option of the backend does the
    same.

    Args:
        master_address: of an interface of this machine that the receivers reach.
        master_port: 0 for a free one, which `master_port` then says.
        world_size: this sender and all receivers.
        group_name: what receivers join. One sender serves one group; any number of senders may coexist.
        backend: "gloo" through host memory, "nccl" between GPUs (this process's current one).
        timeout: seconds within which a `send` has ended at all receivers, or raises.

    Attributes:
        master_port: where the rendezvous listens.

    Raises:
        RequestError: an argument that can't be used here.
    """

    def __init__(
        self,
        master_address: str,
        master_port: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: str = "nccl",
        timeout: float = 60.0,
    ) -> None:
        check_integer("master_port", master_port, low=0, high=65535)
        Place(master_address, master_port, group_name, 0, world_size).check(timeout)
        cuda = torch.cuda.is_available() and backend == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        check_backend(backend, device)
        self._timeout = timeout
        self._store, address, self.master_port = host(master_address, master_port, timeout)
        self._place = Place(address, self.master_port, group_name, 0, world_size)
        self._desk = SenderDesk(Line(self._store, self._place.where, group_name), world_size)
        self._mesh: tuple[int, Mesh] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._maker = MeshMaker(self._place, backend, device, Deadline(timeout), uncancelled)
        greeting = {
            "group_name": group_name,
            "world_size": int(world_size),
            "backend": backend,
            "protocol": PROTOCOL,
        }
        Line(self._store, self._place.where).set(GREETING, json.dumps(greeting))

    def send(
        self,
        named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Send weights to every receiver, each of which must be receiving, or start to within the timeout.

        Returns when all receivers have taken everything: the tensors may be overwritten then. Which format
        is used, and which names, dtypes and shapes must come, is what the receivers were told.

        Args:
            named_tensors: (Hugging Face name, tensor). A mapping or list, in any order, is compared with what
                the receivers expect before anything is sent. An iterator is read on this thread as the
                transfer proceeds, one bucket ahead at most, and checked as it comes; its tensors must be in
                the receivers' order if they receive without buckets.
            bucket_bytes: most bytes of a bucket, the extra memory at each end; a larger tensor has its own.

        Raises:
            EngineTimeoutError: a receiver didn't come or didn't finish within the timeout.
            WeightUpdateError: the tensors aren't those that receivers expect, a receiver refused or failed
                (with its reason), or a connection broke. The sender can be used again in every case.
            EngineStateError: closed.
        """
        check_integer("bucket_bytes", bucket_bytes, low=1)
        source = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
        if isinstance(source, str | bytes | Tensor) or not isinstance(source, Iterable):
            raise RequestError(
                "named_tensors must be a mapping or an iterable of (name, tensor)",
                got=type(named_tensors),
                fix="Pass dict(model.named_parameters()), for example.",
            )
        deadline = Deadline(self._timeout)
        pairs: Iterable[tuple[str, Tensor]] = (check_pair(item, at) for at, item in enumerate(source))
        if isinstance(named_tensors, Collection):
            pairs = list(pairs)
        with self._lock:
            self._refuse_if_closed()
            judge = partial(_judge, pairs) if isinstance(pairs, list) else lambda offer: None
            held = self._mesh[0] if self._mesh else None
            go, offer = self._desk.agree(judge, held, deadline, self._refuse_if_closed)
            try:
                self._transfer(go, offer, pairs, bucket_bytes, deadline)
                self._desk.wait_for_acks(go.transfer, deadline, self._refuse_if_closed)
            except BaseException as error:
                failure = self._explained(go, error)
                self._desk.stop(go.transfer, failure)
                self._drop_mesh()
                if failure is error:
                    raise
                raise failure from error

    def _transfer(
        self,
        go: Go,
        offer: Offer,
        pairs: Iterable[tuple[str, Tensor]],
        bucket_bytes: int,
        deadline: Deadline,
    ) -> None:
        def ask() -> None:
            reason = self._desk.failure(go.transfer)
            if reason is not None:
                raise WeightUpdateError(f"the update failed at a receiver, {reason}")

        ask_seldom = seldom(ask)

        def check() -> None:
            self._refuse_if_closed()
            ask_seldom()

        if self._mesh is None or self._mesh[0] != go.mesh:
            self._drop_mesh()
            prefix = f"{self._place.group_name}/mesh/{go.mesh}"
            self._mesh = (go.mesh, self._maker.form(prefix, deadline, check))
        mesh = self._mesh[1]
        broadcast = partial(mesh.broadcast, deadline=deadline, check=check)
        if isinstance(pairs, list):
            pairs = pairs if offer.flattened else in_order(pairs, offer.expected)
        else:
            pairs = checked(pairs, offer.expected, ordered=not offer.flattened)
        if offer.flattened:
            send_buckets(pairs, bucket_bytes, mesh.device, broadcast)
        else:
            send_plain(pairs, mesh.device, broadcast)

    def _explained(self, go: Go, error: BaseException) -> BaseException:
        """A connection that broke is how a receiver's failure looks from here; what it said is the cause."""
        told = self._desk.failure(go.transfer) if isinstance(error, TokenSpeedError) else None
        if told is None or told in str(error):
            return error
        return WeightUpdateError(f"the update failed at a receiver, {told}")

    def close(self) -> None:
        """Stop listening and let every connection go; receivers that wait fail soon. Any number of times."""
        self._closed = True
        if os.getpid() != self._pid:  # the parent's, whose other threads may have held the lock
            return
        with self._lock:
            self._drop_mesh()
            # The store ends with the last reference to it.
            self._store = self._desk = self._maker = None  # type: ignore[assignment]

    def __enter__(self) -> WeightsSender:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _drop_mesh(self) -> None:
        if self._mesh is not None:
            self._mesh[1].close()
            self._mesh = None

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise EngineStateError("this weight sender is closed", fix="Make a new WeightsSender.")


def _judge(named: list[tuple[str, Tensor]], offer: Offer) -> str | None:
    return mismatch(named, offer.expected)
