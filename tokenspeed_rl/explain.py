"""Why do rollout and trainer differ? One output of the engine, held against the trainer's own forward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenspeed_rl.core.engine_core import EngineCore
from tokenspeed_rl.core.recompute import Recomputed, recompute_decoder, recompute_module
from tokenspeed_rl.core.text import decode
from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.explanation import Explanation, Triple
from tokenspeed_rl.sampling_params import check_number
from tokenspeed_rl.weights import WeightStore, differing_scalings, differing_weights
from tokenspeed_rl.weights.adapters import Adapter

TOP = 5


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
    training = any(part.training for part in module.modules())
    trainer = recompute_module(module, whole, len(prompt), temperature=temperature, top=TOP)

    lora = meta.get("lora")

    def on_the_loop() -> tuple[Recomputed, dict[str, str], dict[str, str], str]:
        core.life.require_readable()
        store = core.source.store
        adapter = _adapter(store, lora)
        engine = recompute_decoder(
            core.source.decoder,
            core.kv.layout,
            whole,
            len(prompt),
            temperature=temperature,
            top=TOP,
            adapter=adapter,
        )
        scalings = differing_scalings(adapter, lora, module) if adapter and lora else {}
        return engine, differing_weights(store, module), scalings, store.version.label

    engine, weights, scalings, version = core.loop.call(on_the_loop).result()
    triples = meta.get("output_token_logprobs")
    rollout = None if triples is None else [value for value, _, _ in triples]
    gaps = [abs(a - b) for a, b in zip(rollout or engine.logprobs, trainer.logprobs, strict=True)]
    at = next((i for i, gap in enumerate(gaps) if not gap <= tolerance), None)
    triples_at = partial(_triples, tokenizer=tokenizer)
    return Explanation(
        tolerance=tolerance,
        temperature=temperature,
        unrecorded=rollout is None,
        repeats=rollout is None
        or all(abs(a - b) <= tolerance for a, b in zip(rollout, engine.logprobs, strict=True)),
        position=at,
        largest=max(math.inf if math.isnan(gap) else gap for gap in gaps),
        sampled_under=_version_at(meta, len(ids) - 1 if at is None else at),
        engine_version=version,
        cached_tokens=meta["cached_tokens"],
        different_weights=weights,
        different_scalings=scalings,
        unlike=_unlike(lora, module, core.source.store.dtype),
        training=training,
        layers=_layers(engine.streams, trainer.streams, len(whole) - 1 if at is None else len(prompt) + at),
        token=None if at is None else ids[at],
        rollout_logprob=None if at is None or rollout is None else rollout[at],
        engine_logprob=None if at is None else engine.logprobs[at],
        trainer_logprob=None if at is None else trainer.logprobs[at],
        engine_top=[] if at is None else triples_at(engine.top[at]),
        trainer_top=[] if at is None else triples_at(trainer.top[at]),
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


def _triples(top: Sequence[tuple[float, int]], *, tokenizer: Any) -> list[Triple]:
    return [
        (value, token, None if tokenizer is None else decode(tokenizer, [token], False))
        for value, token in top
    ]
