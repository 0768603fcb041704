"""Which weights a label means, and what transformers computes with them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.weights import checksum

KNOWN_WITHIN = 30.0
Origin = tuple[int, ...]
"""Of each parameter, in the order of `Weights.names`: the set that it was taken from."""


class Weights:
    """Some complete sets of weights of one tiny model; read only, for all threads."""

    def __init__(self, family: str, count: int, folder: Path, *, tied: bool) -> None:
        """Every set is also saved as a checkpoint in `folder`; `tied`: one embedding for both ends."""
        models = [Tiny.model(family, seed=seed, tie_word_embeddings=tied) for seed in range(count)]
        self.skeleton = models[0]
        self.sets = [{n: p.detach().clone() for n, p in model.named_parameters()} for model in models]
        self.names = list(self.sets[0])
        self.has_experts = any(".experts." in name for name in self.names)
        self.checksums = [checksum(tensors) for tensors in self.sets]
        self.folders = [folder / f"set{number}" for number in range(count)]
        for model, place in zip(models, self.folders, strict=True):
            model.save_pretrained(place)

    def whole(self, number: int) -> Origin:
        """The origin of a complete set."""
        return (number,) * len(self.names)


class Book:
    """What each label of an engine stands for.

    Labels given by the soak end in "/<set>". Those that the engine gives, numbers, are of changes of some
    weights: they are told by whoever made the change, and lie over the version before, which the loop tells.
    """

    def __init__(self, engine: Engine, weights: Weights, first: int) -> None:
        self._weights = weights
        self._first = first
        self._before: dict[str, str] = {}
        self._changes: dict[str, tuple[frozenset[str], int]] = {}
        self._origins: dict[str, Origin] = {}
        self._told = threading.Condition()
        self._last = engine.client._core.source.store.version.label
        life: Any = engine.client._core.life
        committed, version = life.weights_committed, engine.client._core.source.store.version

        def note(*, flush: bool) -> None:
            self._before[version.label], self._last = self._last, version.label
            committed(flush=flush)

        life.weights_committed = note

    def tell(self, label: str, names: Collection[str], number: int) -> None:
        """Version `label` took `names` from a set, and the others from the version before."""
        with self._told:
            self._changes[label] = (frozenset(names), number)
            self._told.notify_all()

    def origin(self, label: str) -> Origin:
        """Where the weights of version `label` came from; waits until whoever made it has told."""
        if "/" in label:
            return self._weights.whole(int(label.rpartition("/")[2]))
        if label == "default":
            return self._weights.whole(self._first)
        with self._told:
            known = self._told.wait_for(lambda: label in self._changes, KNOWN_WITHIN)
        assert known, f"nobody made version {label!r}"
        if label not in self._origins:
            names, number = self._changes[label]
            whole = len(names) == len(self._weights.names)
            below = self._weights.whole(number) if whole else self.origin(self._before[label])
            pairs = zip(self._weights.names, below, strict=True)
            self._origins[label] = tuple(number if name in names else old for name, old in pairs)
        return self._origins[label]


class Reference:
    """The transformers model of one thread, computing with any weights."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._model = copy.deepcopy(weights.skeleton)

    def logits(self, origin: Origin, ids: Sequence[int]) -> Tensor:
        """[len(ids), V] float64: row i is what follows ids[: i + 1]."""
        found: Tensor = self._outputs(origin, ids).logits[0].double()
        return found

    def experts(self, origin: Origin, ids: Sequence[int]) -> list[list[list[int]]]:
        """[len(ids), layers, k]: each token's experts, likeliest first."""
        found = self._outputs(origin, ids, output_router_logits=True).router_logits
        chosen = [logits.topk(self._model.config.num_experts_per_tok).indices for logits in found]
        rows: list[list[list[int]]] = torch.stack(chosen, 1).tolist()
        return rows

    @torch.no_grad()
    def _outputs(self, origin: Origin, ids: Sequence[int], **options: bool) -> Any:
        sets = self._weights.sets
        parameters = {name: sets[at][name] for name, at in zip(self._weights.names, origin, strict=True)}
        arguments = {"input_ids": torch.tensor([list(ids)]), "use_cache": False, **options}
        return functional_call(self._model, parameters, (), arguments)
