"""Where a weight sender and its receivers meet: a small store of keys at the sender's address.

torch's store calls block without an end once the other side hangs, so all of them run on helper threads that
are waited for, not trusted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from tokenspeed_rl.errors import EngineTimeoutError, RequestError, WeightUpdateError
from tokenspeed_rl.sampling_params import check_integer, check_timeout
from tokenspeed_rl.weights.transport.forking import immortal_in_children

T = TypeVar("T")
TICK = 0.02
"""Seconds between two looks at whether a wait was cancelled."""
_SHORTEST_TRY = 0.05


class Deadline:
    """A moment `seconds` from its making."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until then, negative afterwards."""
        return self._at - time.monotonic()


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a group meets, and who one is there."""

    address: str
    port: int
    group_name: str
    rank: int
    world_size: int

    @property
    def where(self) -> str:
        """Address and port, for messages."""
        return f"{self.address}:{self.port}"

    def check(self, timeout: float) -> None:
        """Refuse what no group can have.

        Raises:
            RequestError: the first argument that isn't as documented.
        """
        for name, value in (("master_address", self.address), ("group_name", self.group_name)):
            if not (isinstance(value, str) and value):
                raise RequestError(f"{name} must be a non-empty string", got=value, fix="Pass a str.")
        check_integer("world_size", self.world_size, low=2)
        check_integer("rank", self.rank, low=0, high=self.world_size - 1)
        check_timeout(timeout)
        if not timeout:
            raise RequestError("timeout must be above 0", got=timeout, fix="Pass a number of seconds.")


def uncancelled() -> None:
    """The `check` of a wait that nobody cancels."""


def seldom(act: Callable[[], None]) -> Callable[[], None]:
    """`act`, but at most once in 0.05 s: asking the store takes longer than many a transfer."""
    due = time.monotonic() + 0.05

    def maybe() -> None:
        nonlocal due
        if time.monotonic() >= due:
            act()
            due = time.monotonic() + 0.05

    return maybe


def patiently(act: Callable[[], T], deadline: Deadline, check: Callable[[], None], what: str) -> T:
    """What `act` returns or raises, waited for until the deadline at most.

    It runs on a daemon thread, which is left behind when time is up or `check`, called every `TICK`, raises.

    Raises:
        EngineTimeoutError: the deadline passed; `what` says what didn't come.
    """
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(act())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="tokenspeed_rl weights", daemon=True)
    thread.start()
    thread.join(TICK)
    while thread.is_alive():
        check()
        late = deadline.left <= 0  # looked at first: this process may have been stopped for a while
        thread.join(TICK)
        if late and thread.is_alive():
            raise EngineTimeoutError(f"{what} within {deadline.seconds:g} s")
    if failures:
        raise failures[0]
    return results[0]


class Pulse:
    """Paces a wait that polls: short naps at first, `TICK` later; ends it at the deadline or by `check`."""

    def __init__(self, deadline: Deadline, check: Callable[[], None], what: Callable[[], str]) -> None:
        self._deadline, self._check, self._what = deadline, check, what
        self._nap = 0.00005

    def beat(self) -> None:
        """Sleep a little.

        Raises:
            EngineTimeoutError: the deadline passed.
        """
        self._check()
        if self._deadline.left <= 0:
            raise EngineTimeoutError(f"{self._what()} within {self._deadline.seconds:g} s")
        time.sleep(min(self._nap, max(self._deadline.left, 0.0)))
        self._nap = min(self._nap * 1.5, TICK)


class Line:
    """A connection to a store and the keys below a prefix; a call that isn't answered in time fails.

    Any thread may call. A failure raises `WeightUpdateError`, then and ever after: the store, or its host,
    is gone.

    Attributes:
        where: address and port, for messages.
        patience: seconds a call may take.
    """

    def __init__(self, store: Store, where: str, prefix: str = "", patience: float = 5.0) -> None:
        self._store = PrefixStore(prefix, store) if prefix else store
        self.where = where
        self.patience = patience
        self._lost: str | None = None

    def get(self, key: str) -> str | None:
        """The key's value as text, None without one."""
        raw = self.get_bytes(key)
        return None if raw is None else raw.decode(errors="replace")

    def get_bytes(self, key: str) -> bytes | None:
        """The key's value, None without one."""
        return self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)

    def set(self, key: str, value: str | bytes) -> None:
        """Set the key."""
        self._ask(lambda: self._store.set(key, value))  # type: ignore[arg-type]  # takes bytes as well

    def swap(self, key: str, expected: str, desired: str) -> bool:
        """Set the key if it holds `expected`, in one step; whether it did."""
        return self._ask(lambda: self._store.compare_set(key, expected, desired)) == desired.encode()

    def list_keys(self) -> list[str]:
        """The keys there are; of a line without a prefix, all of the store's, prefixes and all."""
        return self._ask(self._store.list_keys)

    def alive(self) -> bool:
        """Whether the store answers."""
        try:
            self.get("alive")
        except WeightUpdateError:
            return False
        return True

    def _ask(self, act: Callable[[], T]) -> T:
        cause: Exception | None = None
        if self._lost is None:  # a call that hangs would hold up the next
            try:
                return patiently(act, Deadline(self.patience), uncancelled, "it didn't answer")
            except (RuntimeError, EngineTimeoutError) as error:  # torch's network errors are RuntimeErrors
                self._lost, cause = str(error).splitlines()[0], error
        raise WeightUpdateError(
            f"the rendezvous store at {self.where} is gone: {self._lost}",
            fix="Make a new sender there, and init the group again.",
        ) from cause


def host(master_address: str, master_port: int, timeout: float) -> tuple[TCPStore, str, int]:
    """A store that listens on the given address only, in a thread of torch's.

    torch alone would listen on every interface, and anyone who reaches a store can write to it.

    Args:
        master_port: 0 for a free one.

    Returns:
        The store, the numeric address and the port it listens on.

    Raises:
        RequestError: the address isn't one of this machine's, or means all of them; or the port is taken.
    """
    try:
        family, place = _resolve(master_address, master_port)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise _unusable(master_address, master_port, error) from error
    address = str(place[0])
    if address in ("0.0.0.0", "::"):
        listener.close()
        raise RequestError(
            "master_address must be one interface of this machine",
            got=master_address,
            fix="Pass the address under which the receivers reach it; 127.0.0.1 if they run here.",
        )
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a crashed sender's port, at once
        listener.bind(place)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise _unusable(master_address, master_port, error) from error
    port = int(listener.getsockname()[1])
    store = TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return immortal_in_children(store), address, port


def connect(place: Place, deadline: Deadline, check: Callable[[], None]) -> tuple[TCPStore, str]:
    """A client of the store at `place`, and the local address that reaches it.

    Raises:
        EngineTimeoutError: nobody listened there, or it was no store, until the deadline.
        RequestError: the address can't be resolved.
    """
    refused: list[str] = []

    def missing() -> str:
        cause = f" ({refused[-1]})" if refused else ""
        return f"nobody answered at {place.where} for the weight group {place.group_name!r}{cause}"

    pulse = Pulse(deadline, check, missing)
    while True:
        try:
            return patiently(partial(_reach, place, deadline), deadline, check, missing())
        except socket.gaierror as error:
            raise RequestError(
                "master_address can't be resolved", got=place.address, fix="Pass the sender's address."
            ) from error
        except EngineTimeoutError:
            raise
        except (OSError, RuntimeError) as error:
            refused.append(str(error).splitlines()[0])
        pulse.beat()


def _reach(place: Place, deadline: Deadline) -> tuple[TCPStore, str]:
    seconds = max(deadline.left, _SHORTEST_TRY)
    with socket.create_connection((place.address, place.port), seconds) as probe:  # torch fails more loudly
        here, there = str(probe.getsockname()[0]), str(probe.getpeername()[0])
    # A store that somebody else hosts may count its clients before it serves them: hence world_size.
    limit = timedelta(seconds=seconds)
    return TCPStore(there, place.port, place.world_size, is_master=False, timeout=limit), here


def _resolve(address: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    """(family, socket address) of every place a name stands for, IPv4 first."""
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    places = [(family, place) for family, *_, place in found]
    return sorted(places, key=lambda place: place[0] != socket.AF_INET)


def _unusable(address: str, port: int, error: OSError) -> RequestError:
    fix = "Pass an address of this machine, and a port nobody uses; master_port=0 finds a free one."
    return RequestError(f"can't listen there: {error.strerror}", got=f"{address}:{port}", fix=fix)


def quietly(act: Callable[[], None]) -> None:
    """`act`, whose failure to reach the store changes nothing any more."""
    with contextlib.suppress(WeightUpdateError):
        act()
