"""Why do rollout and trainer differ? One output of the engine, held against the trainer's own forward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tokenspeed_rl.core.engine_core import EngineCore
from tokenspeed_rl.core.recompute import Recomputed, recompute_decoder, recompute_module
from tokenspeed_rl.core.text import decode
from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.sampling_params import check_number
from tokenspeed_rl.weights import WeightStore, differing_weights
from tokenspeed_rl.weights.adapters import Adapter

TOP = 5
UNRECORDED = (
    'The output has no logprobs of the kind "sampling", so not the rollout was compared but the engine '
    "as it is now: generate with return_logprob=True."
)
Triple = tuple[float, int, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What was found; `print` it. Three sides are compared: the *rollout*'s logprobs, as the output has them,
    the *engine*'s as of now, and the *trainer*'s."""

    tolerance: float
    """Differences of logprobs, and relative ones of hidden states, up to this count as none."""
    position: int | None
    """Of the first token of `output_ids` where rollout (without logprobs: engine) and trainer differ; None:
    nowhere."""
    token: int | None = None
    """The token there."""
    rollout_logprob: float | None = None
    engine_logprob: float | None = None
    trainer_logprob: float | None = None
    largest: float = 0.0
    """Largest difference of any token's logprob."""
    unrecorded: bool = False
    """The output has no logprobs of the kind "sampling": the engine, as it is now, stands for the rollout."""
    engine_top: list[Triple] = field(default_factory=list)
    """The most likely (logprob, id, text) there, best first."""
    trainer_top: list[Triple] = field(default_factory=list)
    sampled_under: str = ""
    """Version of the weights at that token (without one: at the last)."""
    engine_version: str = ""
    """Version of the engine's weights now."""
    cached_tokens: int = 0
    """Tokens of the prompt whose keys and values came out of the prefix cache."""
    different_weights: dict[str, str] = field(default_factory=dict)
    """Name -> how the trainer's weight differs from the engine's now."""
    first_layer: str | None = None
    """Where hidden states of engine and trainer, up to that token, first differ; None: nowhere."""
    layers: list[tuple[str, float]] = field(default_factory=list)
    """(place, largest difference relative to the largest value there), in the order of the forward."""
    notes: list[str] = field(default_factory=list)
    """What it comes to, in sentences."""

    def __str__(self) -> str:
        sides = "engine (as it is now) and trainer" if self.unrecorded else "rollout and trainer"
        lines = [
            *self.notes,
            f"largest difference of a logprob between {sides}: {self.largest:.2e} "
            f"(up to {self.tolerance:.0e} counts as none)",
        ]
        if self.position is not None:
            lines += [
                f"first at output token {self.position} (id {self.token}), sampled under version "
                f"{self.sampled_under!r}; the engine is at {self.engine_version!r}",
                f"  logprob: rollout {_number(self.rollout_logprob)}, engine now "
                f"{_number(self.engine_logprob)}, trainer {_number(self.trainer_logprob)}",
                f"  engine's top:  {_row(self.engine_top)}",
                f"  trainer's top: {_row(self.trainer_top)}",
            ]
        lines.append(f"tokens of the prompt out of the prefix cache: {self.cached_tokens}")
        lines += [f"weight {name}: {how}" for name, how in list(self.different_weights.items())[:TOP]]
        lines.append(
            "hidden states, engine and trainer: largest difference, relative to the largest value there"
        )
        lines += [f"  {place:<14} {gap:.2e}" for place, gap in self.layers]
        return "\n".join(lines)


def explain(
    core: EngineCore,
    output: Mapping[str, Any],
    module: nn.Module,
    *,
    temperature: float = 1.0,
    tolerance: float | None = None,
    tokenizer: Any = None,
) -> Explanation:
    """As `Engine.explain`. The module runs on the calling thread, the decoder on the loop's."""
    temperature = check_number("temperature", temperature, low=0.0)
    if tolerance is not None:
        tolerance = check_number("tolerance", tolerance, low=0.0)
    prompt, ids, meta = _read(output)
    if not isinstance(module, nn.Module):
        raise RequestError("module must be a transformers causal LM", got=module, fix="Pass the policy.")
    whole = [*prompt, *ids]
    if tolerance is None:
        tolerance = 1e-4 if core.source.store.dtype is torch.float32 else 5e-2
    training = sum(part.training for part in module.modules())
    trainer = recompute_module(module, whole, len(prompt), temperature=temperature, top=TOP)

    def on_the_loop() -> tuple[Recomputed, dict[str, str], str]:
        core.life.require_readable()
        store = core.source.store
        engine = recompute_decoder(
            core.source.decoder,
            core.kv.layout,
            whole,
            len(prompt),
            temperature=temperature,
            top=TOP,
            adapter=_adapter(store, meta.get("lora")),
        )
        return engine, differing_weights(store, module), store.version.label

    engine, weights, version = core.loop.call(on_the_loop).result()
    triples = meta.get("output_token_logprobs")
    rollout = None if triples is None else [value for value, _, _ in triples]
    gaps = [abs(a - b) for a, b in zip(rollout or engine.logprobs, trainer.logprobs, strict=True)]
    at = next((i for i, gap in enumerate(gaps) if not gap <= tolerance), None)
    layers = _layers(engine.streams, trainer.streams, len(whole) - 1 if at is None else len(prompt) + at)
    first = next((place for place, gap in layers if not gap <= tolerance), None)
    under = _version_at(meta, len(ids) - 1 if at is None else at)
    stale = rollout is not None and any(
        not abs(a - b) <= tolerance for a, b in zip(rollout, engine.logprobs, strict=True)
    )
    return Explanation(
        tolerance=tolerance,
        position=at,
        token=None if at is None else ids[at],
        rollout_logprob=None if at is None or rollout is None else rollout[at],
        engine_logprob=None if at is None else engine.logprobs[at],
        trainer_logprob=None if at is None else trainer.logprobs[at],
        largest=max((math.inf if math.isnan(gap) else gap for gap in gaps), default=0.0),
        engine_top=[] if at is None else _triples(engine.top[at], tokenizer),
        trainer_top=[] if at is None else _triples(trainer.top[at], tokenizer),
        sampled_under=under,
        engine_version=version,
        cached_tokens=meta["cached_tokens"],
        different_weights=weights,
        first_layer=first,
        layers=layers,
        unrecorded=rollout is None,
        notes=[
            *([UNRECORDED] if rollout is None else []),
            *(_unlike(meta.get("lora"), module, core.source.store.dtype) if at is not None else []),
            *_notes(
                at, first, stale, weights, under, version, meta["cached_tokens"], training, rollout is None
            ),
        ],
    )


def _adapter(store: WeightStore, name: str | None) -> Adapter | None:
    if name is not None and name not in store.adapters:
        raise RequestError(
            "the adapter of this output is gone", got=name, fix="Explain it while it is there."
        )
    return None if name is None else store.adapters[name]


def _read(output: Mapping[str, Any]) -> tuple[list[int], list[int], Mapping[str, Any]]:
    if not isinstance(output, Mapping) or "output_ids" not in output or "meta_info" not in output:
        raise RequestError(
            "output must be one result of generate", got=output, fix="Explain one result of a list at a time."
        )
    meta, ids = output["meta_info"], list(output["output_ids"])
    if "prompt_ids" not in meta or len(ids) != meta["completion_tokens"]:
        raise RequestError(
            "output must be a final, whole result",
            got=meta.get("finish_reason"),
            fix="Pass what generate returned without stream=True.",
        )
    if not ids:
        raise RequestError("output has no token to explain", fix="Pass a result with output_ids.")
    return list(meta["prompt_ids"]), ids, meta


def _version_at(meta: Mapping[str, Any], position: int) -> str:
    return next(str(s["version"]) for s in meta["weight_versions"] if s["start"] <= position < s["end"])


def _layers(engine: Sequence[Tensor], trainer: Sequence[Tensor], length: int) -> list[tuple[str, float]]:
    """Gaps of the hidden states of the first `length` tokens."""
    sizes = [(len(streams), streams[0].shape[-1]) for streams in (trainer, engine)]
    if sizes[0] != sizes[1]:
        raise RequestError(
            f"module must have the engine's architecture, {sizes[1][0] - 1} layers of {sizes[1][1]}",
            got=f"{sizes[0][0] - 1} layers of {sizes[0][1]}",
            fix="Pass the policy that the engine serves.",
        )
    last = len(engine) - 2
    places = ["embedding", *(f"layer {number}" for number in range(last)), f"layer {last}, norm"]
    gaps = []
    for place, ours, theirs in zip(places, engine, trainer, strict=True):
        scale = ours[:length].abs().max().clamp(min=1e-30)
        gaps.append((place, float((ours[:length] - theirs[:length]).abs().max() / scale)))
    return gaps


def _unlike(asked: str | None, module: nn.Module, dtype: torch.dtype) -> list[str]:
    """Adapters and dtypes that differ, which no update of the weights mends."""
    notes = []
    if (active := _active_adapters(module)) != ({asked} - {None}):
        added = f"adapter {' + '.join(map(repr, sorted(active)))}" if active else "no adapter"
        notes.append(
            f"The output is of {'the base model' if asked is None else f'adapter {asked!r}'}, but the module "
            f"adds {added}: call its set_adapter(), or disable_adapter() for the base model, first."
        )
    dtypes = {param.dtype for param in module.parameters() if param.is_floating_point()}
    if dtypes and dtype not in dtypes:
        theirs = ", ".join(sorted(str(each).removeprefix("torch.") for each in dtypes))
        ours = str(dtype).removeprefix("torch.")
        notes.append(f"The module's weights are {theirs}, the engine's {ours}: no update makes them equal.")
    return notes


def _active_adapters(module: nn.Module) -> set[str]:
    """The LoRA adapters that a forward of the module adds."""
    active: set[str] = set()
    for part in module.modules():
        if not getattr(part, "disable_adapters", False):
            active |= set(getattr(part, "lora_A", ())) & set(getattr(part, "active_adapters", ()))
    return active


def _notes(
    at: int | None,
    first: str | None,
    stale: bool,
    weights: Mapping[str, str],
    under: str,
    version: str,
    cached: int,
    training: int,
    unrecorded: bool,
) -> list[str]:
    if at is None:
        if not unrecorded:
            return ["Rollout and trainer agree."]
        return [f"Engine (version {version!r}; sampled under {under!r}) and trainer agree."]
    notes = []
    if under != version:
        notes.append(
            f"The token was sampled under version {under!r}, and the engine has moved on to {version!r}."
        )
    if weights:
        notes.append(f"Engine and module differ in {len(weights)} of the weights: an update is due.")
    if stale and under == version:
        origin = f" ({cached} tokens of the prompt came out of the cache)" if cached else ""
        notes.append(
            f"Recomputed now, the engine does not repeat the rollout's logprobs{origin}: they are of other "
            "weights (written without weights_changed()?), of KV kept across an update, or of another "
            "temperature than the one given here."
        )
    if first is None:
        notes.append("Hidden states agree: what differs is the head, the temperature, or the past weights.")
    elif not weights:
        notes.append(f"With equal weights, engine and trainer part at {first}: another computation or dtype.")
    if training:
        notes.append("The module is in train mode; it was compared in eval mode, without its dropout.")
    return notes


def _triples(top: Sequence[tuple[float, int]], tokenizer: Any) -> list[Triple]:
    return [
        (value, token, None if tokenizer is None else decode(tokenizer, [token], False))
        for value, token in top
    ]


def _number(value: float | None) -> str:
    return "not recorded" if value is None else f"{value:.5f}"


def _row(top: Sequence[Triple]) -> str:
    return ", ".join(
        f"{token}{'' if text is None else f' {text!r}'} {value:.3f}" for value, token, text in top
    )
