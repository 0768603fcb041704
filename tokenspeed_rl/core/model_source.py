"""From what the caller calls a model to a decoder over its weights: a directory, a hub id, a config, or a
live module."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from tokenspeed_rl.config import EngineConfig
from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.models import Decoder, DecoderSpec, module_classes, slots, spec_from_config
from tokenspeed_rl.weights import (
    SharedWeights,
    WeightStore,
    eos_token_ids,
    find_model,
    load_checkpoint,
    load_tokenizer,
    randomise,
    read_config,
    resolve_dtype,
    share,
)
from tokenspeed_rl.weights.structure import unwrap


@dataclass(slots=True, kw_only=True)
class ModelSource:
    """An opened model. `shared` is the agreement with a live module, None where the engine owns its
    weights."""

    path: str
    hf_config: PretrainedConfig
    spec: DecoderSpec
    store: WeightStore
    decoder: Decoder
    tokenizer: Any
    eos_ids: tuple[int, ...]
    shared: SharedWeights | None

    def share(self, module: nn.Module, version: str | None = None) -> SharedWeights:
        """Read the weights of `module` from now on; a refused module leaves everything as it was."""
        classes = module_classes(self.spec.architecture)
        self.shared = share(module, self.store, classes, version)
        self.decoder.rebuild()
        return self.shared


def open_model(model: Any, config: EngineConfig, tokenizer: Any) -> ModelSource:
    """Open `model` as `config` says; `tokenizer` None takes the one beside it, if there is one.

    Raises:
        ConfigError, WeightUpdateError: it can't be served as asked; a live module is left as it was.
    """
    if isinstance(model, str | Path):
        return _from_files(model, config, tokenizer)
    if isinstance(model, PretrainedConfig):
        return _from_config(model, config, tokenizer)
    if isinstance(model, nn.Module):
        return _from_module(model, config, tokenizer)
    raise ConfigError(
        "model must be a directory, a hub id, a transformers config or a live transformers causal LM",
        got=model,
        fix="Pass Engine('org/name'), Engine(config) or Engine(model).",
    )


def _from_files(model: str | Path, config: EngineConfig, tokenizer: Any) -> ModelSource:
    directory = find_model(model, config.revision)
    hf_config = read_config(directory)
    source = _build(hf_config, config, _device(config), eos_token_ids(directory), path=str(model))
    if not config.skip_tokenizer_init:
        source.tokenizer = load_tokenizer(directory) if tokenizer is None else tokenizer
    if config.load_format == "dummy":
        _randomise(source, config)
    else:
        load_checkpoint(source.store, directory)
    return source


def _from_config(hf_config: PretrainedConfig, config: EngineConfig, tokenizer: Any) -> ModelSource:
    source = _build(hf_config, config, _device(config), eos_token_ids(hf_config), path="")
    source.tokenizer = None if config.skip_tokenizer_init else tokenizer
    _randomise(source, config)
    return source


def _from_module(module: nn.Module, config: EngineConfig, tokenizer: Any) -> ModelSource:
    root = unwrap(module)
    hf_config = getattr(root, "config", None)
    first = next(root.parameters(), None)
    if not isinstance(hf_config, PretrainedConfig) or first is None:
        raise ConfigError("a live model must be a transformers causal LM", got=type(root).__name__)
    dtype = str(first.dtype).removeprefix("torch.")
    if config.dtype not in ("auto", dtype):
        raise ConfigError(
            f"the live model is {dtype}, and shared weights are not cast",
            got=config.dtype,
            fix="Leave dtype out.",
        )
    if config.device != "auto" and torch.device(config.device).type != first.device.type:
        raise ConfigError(
            f"the live model is on {first.device}, and shared weights do not move",
            got=config.device,
            fix="Leave device out, or move the model before sharing it.",
        )
    eos = eos_token_ids(getattr(root, "generation_config", None), hf_config)
    source = _build(
        hf_config, config, first.device, eos, path=getattr(root, "name_or_path", ""), dtype=first.dtype
    )
    source.tokenizer = None if config.skip_tokenizer_init else tokenizer
    source.share(root)
    return source


def _build(
    hf_config: PretrainedConfig,
    config: EngineConfig,
    device: torch.device,
    eos_ids: tuple[int, ...],
    *,
    path: str,
    dtype: torch.dtype | None = None,
) -> ModelSource:
    spec = spec_from_config(hf_config)
    store = WeightStore(
        slots(spec),
        dtype=dtype or resolve_dtype(config.dtype, hf_config),
        device=device,
        version=config.weight_version,
    )
    return ModelSource(
        path=path,
        hf_config=hf_config,
        spec=spec,
        store=store,
        decoder=Decoder(spec, store.weights),
        tokenizer=None,
        eos_ids=eos_ids,
        shared=None,
    )


def _randomise(source: ModelSource, config: EngineConfig) -> None:
    randomise(source.store, seed=config.seed, std=getattr(source.hf_config, "initializer_range", 0.02))
    source.decoder.rebuild()


def _device(config: EngineConfig) -> torch.device:
    if config.device != "auto":
        device = torch.device(config.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "device is cuda, and torch sees none", got=config.device, fix="Pass device='cpu'."
            )
        return device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
