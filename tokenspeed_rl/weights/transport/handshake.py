"""What sender and receivers agree on before a byte moves, and how each transfer ends, in keys of the store.

A receiver's *offer* says what it expects; it stands until the sender takes it or the receiver withdraws it,
whichever comes first. The sender takes the offers of all receivers, then gives one verdict to all: go, or why
not. During the transfer either side can stop it with a reason. Afterwards every receiver acknowledges.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
import uuid
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from tokenspeed_rl.errors import RequestError, WeightUpdateError
from tokenspeed_rl.weights.plain import FLOATS
from tokenspeed_rl.weights.transport.rendezvous import Deadline, Line, Pulse, quietly

GREETING = "tokenspeed_rl/sender"
"""Key, under no prefix, that a `WeightsSender` sets in its store: who it is, as JSON."""
PROTOCOL = 1
"""Version of everything here and of the framing; both ends must have the same."""
_LARGEST = 6 << 20  # bytes; torch's store hangs up above 8 MiB
_LARGEST_TEXT = 1 << 26
_PATIENCE = 1.0
"""Seconds a refusal waits for the other receivers to speak, so that all of them are told."""
_DTYPES = {dtype: name for name, dtype in FLOATS.items()}


class Expected(NamedTuple):
    """One tensor that a receiver was told to expect."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """What a receiver says before a transfer."""

    id: str
    flattened: bool = False
    expected: tuple[Expected, ...] = ()
    mesh: int | None = None
    """The connections it still holds from an earlier transfer."""
    refusal: str | None = None
    """Why it takes nothing."""
    until: float = 0.0
    """Epoch seconds after which a refusal is stale."""

    def encode(self) -> bytes:
        rows = [[name, _DTYPES[dtype], list(shape)] for name, dtype, shape in self.expected]
        fields = [self.id, self.flattened, rows, self.mesh, self.refusal, self.until]
        raw = zlib.compress(json.dumps(fields).encode(), 1)
        if len(raw) > _LARGEST:
            raise RequestError(
                "names and shapes of one update are too many for the rendezvous store",
                got=f"{len(rows):,} tensors, {len(raw):,} bytes",
                fix="Split it into several updates with partial=True and one weight_version.",
            )
        return raw

    @staticmethod
    def decode(raw: bytes) -> Offer:
        text = zlib.decompressobj().decompress(raw, _LARGEST_TEXT)
        id_, flattened, rows, mesh, refusal, until = json.loads(text)
        expected = tuple(Expected(name, FLOATS[dtype], tuple(shape)) for name, dtype, shape in rows)
        return Offer(id_, flattened, expected, mesh, refusal, until)


class Go(NamedTuple):
    """The sender's word to begin."""

    transfer: int
    mesh: int
    """Which connections carry it; the number of an earlier transfer when those are used again."""


class ReceiverDesk:
    """One receiver's side of the agreement."""

    def __init__(self, line: Line, rank: int) -> None:
        self._line = line
        self._rank = rank
        line.set(f"state/{rank}", "idle")  # instead of what a crashed process of this rank has left

    def offer(
        self,
        expected: Sequence[Expected],
        flattened: bool,
        mesh: int | None,
        deadline: Deadline,
        check: Callable[[], None],
    ) -> Go:
        """Wait until the sender takes an offer.

        Raises:
            EngineTimeoutError: no sender came. What `check` raises. In both cases the offer is withdrawn.
            WeightUpdateError: the sender's own tensors don't fit, or another receiver refused; or it is gone.
        """
        offer = Offer(uuid.uuid4().hex, flattened, tuple(expected), mesh)
        state = f"state/{self._rank}"
        self._line.set(f"offer/{self._rank}", offer.encode())
        self._line.set(state, f"open {offer.id}")
        pulse = Pulse(deadline, check, lambda: f"the sender at {self._line.where} sent nothing")
        try:
            while True:
                word, _, transfer = (self._line.get(state) or "").partition(f" {offer.id} ")
                verdict = self._line.get(f"verdict/{transfer}") if word == "taken" else None
                if verdict == "again":
                    self._line.set(state, f"open {offer.id}")
                elif verdict is not None:
                    return self._obey(int(transfer), verdict)
                pulse.beat()
        except BaseException as error:
            quietly(partial(self._withdraw, offer, error))
            raise

    def _obey(self, transfer: int, verdict: str) -> Go:
        word, _, rest = verdict.partition(" ")
        if word != "go":
            raise WeightUpdateError(f"the sender sends nothing: {rest}")
        return Go(transfer, int(rest))

    def _withdraw(self, offer: Offer, error: BaseException) -> None:
        state = f"state/{self._rank}"
        if not self._line.swap(state, f"open {offer.id}", "withdrawn"):
            word, _, transfer = (self._line.get(state) or "").partition(f" {offer.id} ")
            if word == "taken":
                self.acknowledge(int(transfer), error)

    def refuse(self, reason: str, seconds: float) -> None:
        """Leave word for the sender's next `send`, or the one that waits, within the next seconds."""
        offer = Offer(uuid.uuid4().hex, refusal=reason, until=time.time() + seconds)
        self._line.set(f"offer/{self._rank}", offer.encode())
        self._line.set(f"state/{self._rank}", f"refused {offer.id}")

    def stopped(self, transfer: int) -> str | None:
        """Why the sender gave the transfer up; None: it didn't."""
        return self._line.get(f"stop/{transfer}")

    def acknowledge(self, transfer: int, error: BaseException | None) -> None:
        """Tell the sender how the transfer ended here."""
        text = "ok" if error is None else f"error {type(error).__name__}: {error}"
        self._line.set(f"ack/{transfer}/{self._rank}", text)


class SenderDesk:
    """The sender's side of the agreement, with every receiver."""

    def __init__(self, line: Line, world_size: int) -> None:
        self._line = line
        self._ranks = range(1, world_size)
        self._transfers = itertools.count(1)
        self._taken: dict[int, str] = {}

    def agree(
        self,
        judge: Callable[[Offer], str | None],
        mesh: int | None,
        deadline: Deadline,
        check: Callable[[], None],
    ) -> tuple[Go, Offer]:
        """Wait for every receiver's offer, and tell all of them to go, or why not.

        Args:
            judge: what is wrong with an offer, None for nothing.
            mesh: the connections the sender still holds; all receivers must, for them to be used again.

        Raises:
            EngineTimeoutError: receivers didn't come; they are named.
            WeightUpdateError: a receiver refused, two disagree, or `judge` found something.
        """
        missing: list[int] = []
        pulse = Pulse(deadline, check, lambda: f"ranks {missing} of the weight group asked for nothing")
        spoken_since: float | None = None
        while True:
            offers = {rank: self._read(rank) for rank in self._ranks}
            missing[:] = [rank for rank, offer in offers.items() if offer is None]
            standing = {rank: offer for rank, offer in offers.items() if offer is not None}
            refused = any(offer.refusal for offer in standing.values())
            if refused and spoken_since is None:
                spoken_since = time.monotonic()
            late = spoken_since is not None and time.monotonic() - spoken_since > _PATIENCE
            if not missing or (refused and late):
                go = self._conclude(standing, judge, mesh)
                if go is not None:
                    return go, standing[1]
            pulse.beat()

    def _read(self, rank: int) -> Offer | None:
        """The offer or refusal that stands; None: neither."""
        word, _, id_ = (self._line.get(f"state/{rank}") or "").partition(" ")
        raw = self._line.get_bytes(f"offer/{rank}") if word in ("open", "refused") else None
        offer = None if raw is None else Offer.decode(raw)
        if offer is None or offer.id != id_ or (word == "refused" and offer.until < time.time()):
            return None
        return offer

    def _conclude(
        self, offers: dict[int, Offer], judge: Callable[[Offer], str | None], mesh: int | None
    ) -> Go | None:
        """Take the offers and give the verdict; None: one was withdrawn meanwhile, and all stand again."""
        fault = _fault(offers, judge)
        transfer = next(self._transfers)
        verdict = f"no {fault}"
        if fault is None:
            kept = mesh is not None and all(offer.mesh == mesh for offer in offers.values())
            verdict = f"go {mesh if kept else transfer}"
        taken = [self._take(rank, offer, transfer) for rank, offer in offers.items()]
        if fault is None and not all(taken):
            verdict = "again"
        self._line.set(f"verdict/{transfer}", verdict)
        if fault is not None:
            raise WeightUpdateError(f"nothing was sent: {fault}")
        return None if verdict == "again" else Go(transfer, int(verdict.removeprefix("go ")))

    def _take(self, rank: int, offer: Offer, transfer: int) -> bool:
        word = "refused" if offer.refusal else "open"
        self._taken[rank] = f"taken {offer.id} {transfer}"
        return self._line.swap(f"state/{rank}", f"{word} {offer.id}", self._taken[rank])

    def failure(self, transfer: int) -> str | None:
        """The first receiver's word that the transfer failed there; None: none said so."""
        for rank in self._ranks:
            moved_on = self._line.get(f"state/{rank}") != self._taken[rank]  # read first, set last
            text = self._line.get(f"ack/{transfer}/{rank}")
            if text is not None and text.startswith("error "):
                return f"rank {rank}: {text.removeprefix('error ')}"
            if text is None and moved_on:
                return f"rank {rank}: it joined the group anew"
        return None

    def wait_for_acks(self, transfer: int, deadline: Deadline, check: Callable[[], None]) -> None:
        """Wait until every receiver has taken everything.

        Raises:
            EngineTimeoutError: one said nothing. WeightUpdateError: one failed.
        """
        waiting = list(self._ranks)
        pulse = Pulse(deadline, check, lambda: f"ranks {waiting} of the weight group didn't acknowledge")
        while True:
            reason = self.failure(transfer)
            if reason is not None:
                raise WeightUpdateError(f"the update failed at a receiver, {reason}")
            waiting = [rank for rank in waiting if self._line.get(f"ack/{transfer}/{rank}") is None]
            if not waiting:
                return
            pulse.beat()

    def stop(self, transfer: int, error: BaseException) -> None:
        """Tell receivers that nothing more will come."""
        quietly(lambda: self._line.set(f"stop/{transfer}", f"{type(error).__name__}: {error}"))


def _fault(offers: dict[int, Offer], judge: Callable[[Offer], str | None]) -> str | None:
    for rank, offer in offers.items():
        if offer.refusal is not None:
            return f"rank {rank} refused: {offer.refusal}"
    first = min(offers)
    for rank, offer in offers.items():
        if (offer.flattened, offer.expected) != (offers[first].flattened, offers[first].expected):
            return f"ranks {first} and {rank} were told to expect different weights"
    return judge(offers[first])
