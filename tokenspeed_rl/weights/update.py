"""One change of the engine's own weights: judged, written in place, then committed or taken back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tokenspeed_rl.errors import WeightUpdateError
from tokenspeed_rl.weights.mapping import Coverage, Target
from tokenspeed_rl.weights.plain import fault_of
from tokenspeed_rl.weights.receipt import Receipt
from tokenspeed_rl.weights.store import WeightStore


class WeightUpdate:
    """An update under way; a store has one at a time.

    A whole set is judged by `check_whole` (or `check_promised`) first; then every tensor goes through `claim`
    and `write`; then `commit`, or after any exception `fail`, ends the update. No tensor is kept.

    Unless partial, an update writes every weight of the model. A partial one without a label is complete in
    itself: it changes some weights of valid ones, and leaves invalid ones invalid. A partial one with a label
    is a piece of that version: the weights are invalid until its pieces together have written every weight.

    `check_*`, `claim` and `write` run on the caller's thread, `commit` and `fail` on the loop's.

    Args:
        store: allocated, owned by the engine, resident.
        kind: ``tensor``, ``distributed``, ``disk`` or ``loaded``, for the receipt.
        label: of the new version; None: the number of commits so far, or at the very start the store's own.
        partial: not every weight will come.
        atomic: keep what is overwritten in host memory, so that `fail` puts it back.
    """

    def __init__(
        self,
        store: WeightStore,
        *,
        kind: str,
        label: str | None = None,
        partial: bool = False,
        atomic: bool = False,
    ) -> None:
        self.partial, self.atomic = partial, atomic
        self.wrote = False
        """Whether any weight may have changed."""
        self._store, self._kind, self._label = store, kind, label
        self._journal: list[tuple[Tensor, Tensor]] | None = [] if atomic else None
        self._claims: Coverage | None = None  # made when the update has its turn
        self._judged: dict[str, Target | None] | None = None  # where a whole set goes
        self._ties_agree = False  # judged before the first write
        self._ended = False
        self._nbytes = 0
        self._began = time.perf_counter()

    def check_whole(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Judge a whole set before anything is written.

        Raises:
            WeightUpdateError: counts and first names of weights missing (unless partial), unknown,
                mis-shaped, unfit (no plain float tensors) or given twice; or two names of a tied weight that
                differ.
        """
        coverage, targets = self._new_coverage(), dict[str, Target | None]()
        faults = self._judge(coverage, named, targets, complete=not self.partial)
        del named
        self._accept(faults)
        self._claims, self._judged = coverage, targets

    def check_tied(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Judge the two names of a tied weight out of a promised set: `WeightUpdateError` if they differ."""
        faults = self._judge(self._new_coverage(), named, {}, complete=False)
        del named
        self._accept(faults)

    def _accept(self, faults: list[WeightUpdateError]) -> None:
        """Raise the fault, popped: no frame of its traceback may hold it, and by it the callers' tensors."""
        if faults:
            raise faults.pop()
        self._ties_agree = True

    def _judge(
        self,
        coverage: Coverage,
        named: Sequence[tuple[str, Tensor]],
        targets: dict[str, Target | None],
        *,
        complete: bool,
    ) -> list[WeightUpdateError]:
        """What is wrong with the set, if anything: one error, whose traceback holds none of its tensors.
        Fills `targets` with where each goes."""
        given, tied = None, []
        for name, tensor in named:
            target = targets[name] = coverage.claim(name, tensor.shape, self._fault(name, tensor))
            if target is not None and target.again:
                tied.append((target, tensor))
            elif target is not None and target.parts[0].hf_name == self._store.names.embedding:
                given = tensor
        try:
            coverage.check(complete=complete)
        except WeightUpdateError as error:
            return [error.with_traceback(None)]
        agree = all(self._store.agrees(target, tensor, given) for target, tensor in tied)
        return [] if agree else [_untied()]

    def check_promised(self, promised: Sequence[tuple[str, Sequence[int]]]) -> list[Target | None]:
        """Judge names and shapes of tensors that are still to come, as `check_whole` does.

        Returns:
            Where each will go; None for what follows from the config.
        """
        coverage = self._new_coverage()
        targets = [coverage.claim(name, shape) for name, shape in promised]
        coverage.check(complete=not self.partial)
        return targets

    def claim(self, name: str, tensor: Tensor) -> Target | None:
        """Where the next tensor goes; None: nowhere, its values follow from the config (`inv_freq`).

        After `check_whole` it must be one of that set.

        Raises:
            WeightUpdateError: unknown, mis-shaped, unfit, or given twice.
        """
        if self._judged is not None:
            return self._judged[name]
        shape, fault = tensor.shape, self._fault(name, tensor)
        del tensor
        target = self._coverage.claim(name, shape, fault)
        if target is None:
            self._coverage.check(complete=False)
        return target

    def _fault(self, name: str, tensor: Tensor) -> str | None:
        """What makes a tensor unfit to be this weight, whatever its shape."""
        fault = fault_of(tensor)
        if fault is None and self._store.is_elsewhere_in_it(name, tensor):
            return "a view of another of the engine's own weights, which is written too: pass its clone()"
        return fault

    def write(self, target: Target, tensor: Tensor) -> None:
        """Copy a claimed tensor into its place, cast once to the store's dtype.

        Raises:
            WeightUpdateError: it is tied to a weight already written and differs from it.
        """
        if target.again:
            agrees = self._ties_agree or self._store.agrees(target, tensor)
            del tensor
            if not agrees:
                raise _untied()
            return
        if not self.wrote:
            self._store.begin_writing()
            self.wrote = True
        if self._journal is not None:
            self._journal += self._saved(target)
        if torch.is_inference_mode_enabled():  # entering it costs more than copying a small tensor
            with torch.inference_mode(False):
                self._nbytes += self._store.write(target, tensor)
        else:
            self._nbytes += self._store.write(target, tensor)

    def _saved(self, target: Target) -> list[tuple[Tensor, Tensor]]:
        places = self._store.places(target)
        try:
            with torch.inference_mode(False):
                return [(place, place.to("cpu", copy=True)) for place in places]
        except RuntimeError as error:  # what torch's allocators raise
            wanted = sum(place.nbytes for place in places)
            raise WeightUpdateError(
                f"host memory to put {wanted:,} bytes back from is not to be had",
                fix="Free some, or pass atomic=False.",
            ) from error

    def run(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """`claim` and `write` every tensor, one at a time."""
        for name, tensor in named:
            target = self.claim(name, tensor)
            if target is not None:
                self.write(target, tensor)
            del tensor

    def commit(self) -> Receipt:
        """What was written is in force from now on, as far as the set goes.

        Raises:
            WeightUpdateError: weights are missing, or a claim failed. `fail` is still to end the update, as
                after an error of the device; the version is what it was.
        """
        self._coverage.check(complete=not self.partial)
        self._store.settle()  # the last thing that can fail
        missing = self._advance()
        self._ended, self._journal = True, None
        if self.wrote:
            self._store.end_writing()
        return self._store.receipt(
            loaded=self._coverage.loaded,
            missing=missing,
            nbytes=self._nbytes,
            seconds=time.perf_counter() - self._began,
            kind=self._kind,
        )

    def _advance(self) -> tuple[str, ...]:
        """Move the version on; returns the names that this update, or its version, has not written."""
        version, names, written = self._store.version, self._store.names, self._coverage.claimed
        every = names.part_names
        if not self.partial or (self._label is None and len(written) == len(every)):
            if version.epoch == 0 and self._label is None:
                version.start()
            else:
                version.commit(self._label)
        elif self._label is None:
            version.overwrite(written, len(every))
        elif written:
            written = {**version.arrived(self._label), **written}
            version.add_piece(self._label, written, every)
        return names.folded(set(every) - written.keys())

    def fail(self, reason: str) -> None:
        """Give the update up: atomic ones leave no trace, others invalid weights if anything was written.

        After `commit`, or another `fail`, nothing happens.

        Args:
            reason: completes "a weight update failed half-way: ...".
        """
        if self._ended or not self.wrote:
            return
        self._ended = True
        why = f"a weight update failed half-way: {reason}"
        try:
            if self._journal is not None:
                why = f"a failed weight update could not be taken back: {reason}"
                self._restore(self._journal)
                why = ""
            else:
                self._store.settle()
        finally:
            self._journal = None
            if why:
                self._store.version.invalidate(why)
            self._store.end_writing()

    @torch.no_grad()
    def _restore(self, journal: list[tuple[Tensor, Tensor]]) -> None:
        for place, old in journal:
            place.copy_(old)
        self._store.settle()

    @property
    def _coverage(self) -> Coverage:
        if self._claims is None:
            self._claims = self._new_coverage()
        return self._claims

    def _new_coverage(self) -> Coverage:
        if not self.partial or self._label is None:
            return Coverage(self._store.names)
        return Coverage(self._store.names, self._store.version.arrived(self._label))


def _untied() -> WeightUpdateError:
    return WeightUpdateError(
        "lm_head.weight and the embedding differ, but the model's config ties them",
        fix="Give one of them, or set tie_word_embeddings=False in the model's config.",
    )
