"""Slots: where the engine keeps a weight, and which names lead there."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from tokenspeed_rl.errors import WeightUpdateError

FUSED = {("q_proj", "k_proj", "v_proj"): "qkv_proj", ("gate_proj", "up_proj"): "gate_up_proj"}
"""Projections that share a slot, and the name under which other engines write them stacked."""

_WRAPPERS = frozenset({"module", "_orig_mod", "base_layer"})
"""Of data parallel, compile and PEFT, at any depth."""
_ADAPTER_PREFIX = ("base_model", "model")
_HEAD, _EMBEDDING, _SCORE = "lm_head.weight", "embed_tokens.weight", "score.weight"
_DERIVED = "rotary_emb.inv_freq"  # older checkpoints carry it; it follows from the config
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Part:
    """One Hugging Face parameter inside a slot: its name and shape."""

    hf_name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slot:
    """One weight as the kernels read it: its parts (q, k, v; gate, up; or one) stacked along dim 0.

    The parts are what may be given alone. A live module keeps each as a parameter, or, of experts, all of
    them `packed` in one [E, rows, columns] with the bytes of the stacked parts.
    """

    name: str
    parts: tuple[Part, ...]
    packed: Part | None = None
    """That parameter; for a router it is the same tensor under the live module's name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that the kernels read."""
        return _stacked(self.parts) if self.packed is None else self.packed.shape

    @property
    def parameters(self) -> tuple[Part, ...]:
        """What a live module keeps here."""
        return self.parts if self.packed is None else (self.packed,)

    @property
    def fused_name(self) -> str | None:
        """Hugging Face style name of the stacked parts (``...qkv_proj.weight``), None for a single part."""
        if self.packed is not None:
            return self.packed.hf_name
        projections = tuple(part.hf_name.rpartition(".")[0].rpartition(".")[2] for part in self.parts)
        fused = FUSED.get(projections)
        return self.parts[0].hf_name.replace(projections[0], fused) if fused else None


@dataclass(frozen=True, slots=True)
class Target:
    """Where a named tensor goes: parts ``[start, stop)`` of a slot, stacked in the tensor's rows."""

    slot: Slot
    start: int
    stop: int
    packed: bool = False
    """All the parts, in the shape of the slot's packed parameter."""
    again: bool = False
    """The parts were written under their tied name already: the tensor must hold the same values."""
    parts: tuple[Part, ...] = field(init=False, compare=False)
    shape: tuple[int, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        parts = self.slot.parts[self.start : self.stop]
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "shape", self.slot.shape if self.packed else _stacked(parts))

    @classmethod
    def whole(cls, slot: Slot) -> Target:
        """All of a slot."""
        return cls(slot, 0, len(slot.parts), packed=slot.packed is not None)


def _stacked(parts: Sequence[Part]) -> tuple[int, ...]:
    if len(parts) == 1:
        return parts[0].shape
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


def canonical(name: str) -> str:
    """`name` without what wrappers add: ``module.``, ``_orig_mod.``, PEFT's ``base_layer.`` (anywhere) and
    ``base_model.model.``."""
    pieces = [piece for piece in name.split(".") if piece not in _WRAPPERS]
    if tuple(pieces[:2]) == _ADAPTER_PREFIX:
        pieces = pieces[2:]
    return ".".join(pieces)


def is_head(name: str) -> bool:
    """Whether a canonical name is the output head's weight, which may be tied."""
    return name == _HEAD


def is_embedding(name: str) -> bool:
    """Whether a canonical name is the input embedding's weight."""
    return name.endswith(_EMBEDDING)


class NameMap:
    """Resolves any spelling of a weight's name to its place in the slots.

    Understood: Hugging Face names (of experts those of live modules and of checkpoints), fused names
    (``qkv_proj``, ``gate_up_proj``), slot names, each behind any of the wrappers' prefixes; and
    ``lm_head.weight`` of a language model without a head of its own: the embedding.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        self._targets: dict[str, Target] = {}
        self.embedding = ""  # Hugging Face name of the input embedding
        for slot in self.slots:
            for alias in filter(None, (slot.name, slot.fused_name)):
                self._targets[alias] = Target.whole(slot)
            for i, part in enumerate(slot.parts):
                self._targets[part.hf_name] = Target(slot, i, i + 1)
                if is_embedding(part.hf_name):
                    self.embedding = part.hf_name
        self.tied = self.embedding != "" and self._targets.keys().isdisjoint((_HEAD, _SCORE))
        if self.tied:
            self._targets[_HEAD] = self._targets[self.embedding]

    def resolve(self, name: str) -> Target | None:
        """Where the tensor `name` goes; None for a name that is no weight of this model."""
        return self._targets.get(self.canonical(name))

    def canonical(self, name: str) -> str:
        """`canonical`, at once for a name that is known as it stands."""
        return name if name in self._targets else canonical(name)

    @property
    def hf_names(self) -> list[str]:
        """The name of every parameter of a live module, ties once, in slot order."""
        return [part.hf_name for slot in self.slots for part in slot.parameters]

    @property
    def part_names(self) -> list[str]:
        """The Hugging Face name of every part, in slot order."""
        return [part.hf_name for slot in self.slots for part in slot.parts]

    def folded(self, parts: Container[str]) -> tuple[str, ...]:
        """The names of `parts` in slot order; of packed ones, where all are among them, the packed name."""
        found: list[str] = []
        for slot in self.slots:
            names = [part.hf_name for part in slot.parts if part.hf_name in parts]
            whole = slot.packed is not None and len(names) == len(slot.parts)
            found += [part.hf_name for part in slot.parameters] if whole else names
        return tuple(found)


@dataclass(slots=True)
class Coverage:
    """Which parts a set of named tensors writes, and what is wrong with the set.

    Call `claim` for each tensor, then `check` for the whole. Nothing is written here: a set can be judged
    before the first byte moves.
    """

    names: NameMap
    earlier: Mapping[str, str] = field(default_factory=dict)
    """What earlier pieces of the same version wrote: as `claimed`. Given again it is written again."""
    claimed: dict[str, str] = field(default_factory=dict)
    """Hugging Face name of each part claimed -> the canonical name under which it was given."""
    unknown: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    _offered: set[str] = field(default_factory=set)  # parts that were given, in whatever shape

    def claim(self, name: str, shape: Sequence[int], fault: str | None = None) -> Target | None:
        """The place of the tensor `name`; None when it is an offender (noted) or follows from the config.

        Args:
            fault: what makes the tensor unfit whatever its name and shape, None for nothing.
        """
        bare = self.names.canonical(name)
        target = self.names.resolve(bare)
        if target is None:
            if not bare.endswith(_DERIVED):
                self.unknown.append(name)
            return None
        parts = [part.hf_name for part in target.parts]
        self._offered.update(parts)
        if fault is not None:
            self.unfit.append(f"{name} is {fault}")
        elif tuple(shape) != target.shape:
            self.misshaped.append(f"{name} {list(shape)} instead of {list(target.shape)}")
        elif self.claimed.keys().isdisjoint(parts):
            self.claimed.update(dict.fromkeys(parts, bare))
            return replace(target, again=True) if self._is_tied(bare, self.earlier) else target
        elif self._is_tied(bare, self.claimed):
            return replace(target, again=True)
        else:
            self.repeated.append(name)
        return None

    def _is_tied(self, bare: str, writers: Mapping[str, str]) -> bool:
        """Whether `writers` gave, by the other of the two names, the weight that `bare` names."""
        writer = writers.get(self.names.embedding) if self.names.tied else None
        return writer is not None and (bare == _HEAD) != (writer == _HEAD) and self._is_embedding(bare)

    def _is_embedding(self, bare: str) -> bool:
        target = self.names.resolve(bare)
        return target is not None and target.parts[0].hf_name == self.names.embedding

    @property
    def loaded(self) -> tuple[str, ...]:
        """Hugging Face names of what was claimed, in slot order."""
        return self.names.folded(self.claimed)

    @property
    def missing(self) -> tuple[str, ...]:
        """Hugging Face names of what nothing has claimed, in slot order."""
        return self.names.folded(set(self.names.part_names) - self.claimed.keys())

    def check(self, *, complete: bool = True) -> None:
        """Raise `WeightUpdateError` with counts and the first offenders, unless every claim was right.

        Args:
            complete: whether parts that nothing claimed are a fault too.
        """
        kinds = {
            "missing": self._not_offered() if complete else (),
            "unknown": self.unknown,
            "mis-shaped": self.misshaped,
            "unfit": self.unfit,
            "given twice": self.repeated,
        }
        if not any(kinds.values()):
            return
        counts = ", ".join(f"{len(found)} {kind}" for kind, found in kinds.items() if found)
        shown = "; ".join(f"{kind}: {_first(found)}" for kind, found in kinds.items() if found)
        raise WeightUpdateError(
            f"the tensors do not fit the model's weights: {counts} ({shown})",
            fix=f"Give each of the model's {len(self.names.hf_names)} weights once, by Hugging Face name.",
        )

    def _not_offered(self) -> tuple[str, ...]:
        return self.names.folded(set(self.names.part_names) - self.claimed.keys() - self._offered)


def _first(found: Sequence[str]) -> str:
    return ", ".join(found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")
