"""The connections that carry the weights: one torch backend, never a registered process group."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from tokenspeed_rl.errors import EngineTimeoutError, RequestError, WeightUpdateError
from tokenspeed_rl.weights.transport.forking import immortal_in_children
from tokenspeed_rl.weights.transport.rendezvous import Deadline, Place, Pulse, connect, patiently

BACKENDS = ("gloo", "nccl")
_GRACE = 0.25
"""Seconds after the deadline in which gloo ends an operation by itself, which leaves less behind."""


def check_backend(backend: str, device: torch.device) -> None:
    """Refuse a backend that can't carry weights between devices like this one.

    Raises:
        RequestError: unknown, not in this build of torch, or NCCL without a GPU.
    """
    if backend not in BACKENDS:
        raise RequestError(
            "backend must be 'gloo' or 'nccl'", got=backend, fix='"gloo" on CPUs, "nccl" on GPUs.'
        )
    if backend == "nccl" and (device.type != "cuda" or not dist.is_nccl_available()):
        raise RequestError(
            "backend='nccl' carries weights between GPUs only",
            got=f"device {device}",
            fix='Pass backend="gloo", here and at the other end.',
        )


class Mesh:
    """One backend of torch between rank 0 and the receivers, and a broadcast on it that can be cancelled.

    Args:
        group: `ProcessGroupGloo` or `ProcessGroupNCCL`; the mesh owns it.
        backend: which of them.
        device: where tensors must be to be sent or received.
    """

    def __init__(self, group: Any, backend: str, device: torch.device) -> None:
        self._group = immortal_in_children(group)
        self._backend = backend
        self.device = device
        self._pid = os.getpid()

    def broadcast(self, tensor: Tensor, deadline: Deadline, check: Callable[[], None]) -> None:
        """Send rank 0's tensor, or receive into `tensor`; back when the memory is read or written.

        Args:
            tensor: contiguous, on `device`, same dtype and shape on every rank (gloo ends the process if a
                receiver's is smaller).
            check: called first, and polled meanwhile; what it raises ends the wait.

        Raises:
            EngineTimeoutError: the deadline passed.
            WeightUpdateError: the connection to a peer broke, or the mesh is closed. In either case, and when
                cancelled, the mesh can only be closed.
        """
        check()
        group = self._group  # kept until this is over, whoever closes the mesh meanwhile
        if group is None:
            raise WeightUpdateError("the connections of the weight group were closed")
        flat = tensor.reshape(-1)
        wire = flat.view(torch.uint8) if self._backend == "gloo" else flat  # gloo knows few dtypes
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=max(deadline.left, 0.001))
        work = self._start(group, wire, options, deadline, check)
        late = Deadline(deadline.left + _GRACE)
        pulse = Pulse(late, check, lambda: "the other end neither sent nor took the next tensor")
        try:
            while not work.is_completed():
                pulse.beat()
            work.wait()
        except RuntimeError as error:
            if deadline.left <= 0:
                raise EngineTimeoutError(f"the transfer didn't end within {deadline.seconds:g} s") from error
            raise WeightUpdateError(
                f"the connection to a peer of the weight group broke: {str(error).splitlines()[0]}"
            ) from error
        finally:
            if not work.is_completed():
                _bury(group, work)

    def _start(
        self, group: Any, wire: Tensor, options: Any, deadline: Deadline, check: Callable[[], None]
    ) -> Any:
        if self._backend == "gloo":
            return group.broadcast([wire], options)
        torch.cuda.current_stream(wire.device).synchronize()  # the helper thread has a stream of its own
        start = partial(group.broadcast, [wire], options)
        return patiently(start, deadline, check, "the NCCL communicator didn't form")

    def close(self) -> None:
        """Let go of the connections; returns at once, also when an operation hangs. Any thread."""
        group, self._group = self._group, None
        if group is not None and self._backend == "nccl" and os.getpid() == self._pid:
            _abort(group)


class MeshMaker:
    """Connects the ranks of one group, as often as needed.

    It has a connection to the store of its own, made beforehand: forming blocks one, and making one takes
    seconds where reverse name lookups, which torch makes, are slow.
    """

    def __init__(
        self, place: Place, backend: str, device: torch.device, deadline: Deadline, check: Callable[[], None]
    ) -> None:
        self._place, self._backend, self._device = place, backend, device
        self._store: Any
        self._store, self._here = connect(place, deadline, check)

    def form(self, prefix: str, deadline: Deadline, check: Callable[[], None]) -> Mesh:
        """Connect all ranks; blocks until every one of them does this.

        Args:
            prefix: of keys that all ranks use for this mesh alone.

        Raises:
            EngineTimeoutError, WeightUpdateError: the store or a peer isn't there.
        """
        root = self._store if self._store is not None else connect(self._place, deadline, check)[0]
        self._store = None  # should this fail, the connection may hang
        store = PrefixStore(prefix, root)
        if self._backend == "nccl":
            return Mesh(self._nccl(store), "nccl", self._device)
        mesh = Mesh(self._gloo(store, deadline, check), "gloo", torch.device("cpu"))
        self._store = root
        return mesh

    def _nccl(self, store: Any) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(days=1)  # its watchdog would end the process; `broadcast` has a deadline
        return dist.ProcessGroupNCCL(store, self._place.rank, self._place.world_size, options)

    def _gloo(self, store: Any, deadline: Deadline, check: Callable[[], None]) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=max(deadline.left, 0.001))
        options._devices = [gloo.create_device(hostname=self._here)]
        missing = "the ranks of the weight group didn't connect"
        try:
            make = partial(gloo, store, self._place.rank, self._place.world_size, options)
            return patiently(make, deadline, check, missing)
        except RuntimeError as error:
            cause = str(error).splitlines()[0]
            if deadline.left <= 0:
                raise EngineTimeoutError(f"{missing}: {cause}") from error
            raise WeightUpdateError(f"a rank of the weight group went away meanwhile: {cause}") from error


def _bury(group: Any, work: Any) -> None:
    """Keep an abandoned operation, and the group whose destructor would wait for it, until it ends by itself.

    A daemon thread's frame holds them: should the interpreter exit first, they are never destroyed.
    """

    def watch(group: Any, work: Any) -> None:
        while not work.is_completed():
            time.sleep(0.05)

    threading.Thread(target=watch, args=(group, work), name="tokenspeed_rl weights", daemon=True).start()


def _abort(group: Any) -> None:
    threading.Thread(target=group.abort, name="tokenspeed_rl weights", daemon=True).start()
