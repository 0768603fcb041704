"""From what the caller calls a model to a decoder over its weights: a directory, a hub id, a config, or a
live module."""

import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from tokenspeed_rl.config import EngineConfig
from tokenspeed_rl.core.backend import attention_backend
from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.layers.rope import inverse_frequencies
from tokenspeed_rl.memory import Memory, memory_for
from tokenspeed_rl.models import (
    Decoder,
    DecoderSpec,
    config_faults,
    module_classes,
    module_faults,
    slots,
    spec_from_config,
)
from tokenspeed_rl.weights import (
    Receipt,
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
    unwrap,
)


@dataclass(slots=True, kw_only=True)
class ModelSource:
    """An opened model. `shared` is the agreement with a live module, None where the engine owns its
    weights."""

    path: str
    hf_config: PretrainedConfig
    spec: DecoderSpec
    store: WeightStore
    memory: Memory
    decoder: Decoder
    tokenizer: Any
    eos_ids: tuple[int, ...]
    shared: SharedWeights | None = None
    _sharing: threading.Lock = field(default_factory=threading.Lock)

    def share(self, module: nn.Module, version: str | None = None) -> SharedWeights:
        """Read the weights of `module` from now on; a refused module leaves everything as it was."""
        if wrong := config_faults(self.spec, unwrap(module)):  # said before whatever follows from it
            raise ConfigError(
                f"the module to share is of another model: {'; '.join(wrong[:3])}; nothing was shared",
                fix="Share a module with the config that the engine was made with, or make another engine.",
            )
        classes, faults = module_classes(self.spec.architecture), partial(module_faults, self.spec)
        with self._sharing:
            self.shared = share(module, self.store, classes, version, faults)
        self.decoder.follow_rope(_other_frequencies(self.shared.module, self.spec))
        return self.shared

    def weights_changed(self, version: str | None) -> Receipt:
        """As `SharedWeights.weights_changed`, of the module that is shared."""
        assert self.shared is not None
        with self._sharing:
            return self.shared.weights_changed(version)

    def check_shared(self) -> None:
        """Raise `WeightsInvalidError` where a shared module's parameters moved. From any thread."""
        with self._sharing:  # else a check of the old agreement could invalidate a new one
            if self.shared is not None:
                self.shared.check_storage()


def _other_frequencies(module: nn.Module, spec: DecoderSpec) -> Tensor | None:
    """The rotary frequencies of a module that `.to(dtype)` rounded along with its weights, perhaps there and
    back; None: it has those that its config says."""
    exact = inverse_frequencies(spec.rope)
    for name, buffer in module.named_buffers():
        if name.endswith("rotary_emb.inv_freq"):
            if buffer.dtype == torch.float32 and spec.rope.kind == "dynamic":
                return None  # it follows the longest context that the module has seen
            found = buffer.detach().float().cpu()
            return None if torch.allclose(found, exact, rtol=1e-5, atol=0.0) else buffer
    return None


def open_model(model: Any, config: EngineConfig, tokenizer: Any) -> ModelSource:
    """Open `model` as `config` says; `tokenizer` None takes the one beside it, if there is one.

    Raises:
        ConfigError, WeightUpdateError: it can't be served as asked; a live module is left as it was.
    """
    _refuse_what_would_be_ignored(model, config, tokenizer)
    if isinstance(model, str | Path):
        return _from_files(model, config, tokenizer)
    if isinstance(model, PretrainedConfig):
        return _from_config(model, config, tokenizer)
    if isinstance(model, nn.Module):
        return _from_module(model, config, tokenizer)
    raise ConfigError(
        "model must be a directory, a hub id, a transformers config or a live transformers model",
        got=model,
        fix="Pass Engine('org/name'), Engine(config) or Engine(model).",
    )


def _refuse_what_would_be_ignored(model: Any, config: EngineConfig, tokenizer: Any) -> None:
    files, live = isinstance(model, str | Path), isinstance(model, nn.Module)
    if config.model_path not in (None, str(model) if files else None):
        raise ConfigError(
            "model_path names another model than the one given", got=config.model_path, fix="Leave it out."
        )
    if config.revision is not None and not files:
        raise ConfigError(
            "revision is for hub ids, and the model is an object", got=config.revision, fix="Leave it out."
        )
    if not files and (config.load_format == "safetensors" or (live and config.load_format == "dummy")):
        why = "a live model has its weights" if live else "a config has no files"
        raise ConfigError(f"load_format must be auto: {why}", got=config.load_format, fix="Leave it out.")
    if tokenizer is None:
        return
    if config.skip_tokenizer_init:
        raise ConfigError("a tokenizer is given, and skip_tokenizer_init is True", fix="Drop one of them.")
    if not (callable(tokenizer) and hasattr(tokenizer, "decode") and hasattr(tokenizer, "__len__")):
        raise ConfigError(
            "tokenizer must be a transformers tokenizer", got=tokenizer, fix="Pass AutoTokenizer's."
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
        raise ConfigError(
            "a live model must be a transformers causal LM, or one that scores", got=type(root).__name__
        )
    dtype = str(first.dtype).removeprefix("torch.")
    if config.dtype not in ("auto", dtype):
        raise ConfigError(
            f"the live model is {dtype}, and shared weights are not cast",
            got=config.dtype,
            fix="Leave dtype out.",
        )
    asked = first.device if config.device == "auto" else torch.device(config.device)
    if asked.type != first.device.type or asked.index not in (None, first.device.index):
        raise ConfigError(
            f"the live model is on {first.device}, and shared weights do not move",
            got=config.device,
            fix="Leave device out, or move the model before sharing it.",
        )
    eos = eos_token_ids(getattr(root, "generation_config", None), hf_config)
    source = _build(
        hf_config,
        config,
        first.device,
        eos,
        path=getattr(root, "name_or_path", ""),
        dtype=first.dtype,
        live=type(root).__name__,
    )
    source.tokenizer = None if config.skip_tokenizer_init else tokenizer
    source.share(module)
    return source


def _build(
    hf_config: PretrainedConfig,
    config: EngineConfig,
    device: torch.device,
    eos_ids: tuple[int, ...],
    *,
    path: str,
    dtype: torch.dtype | None = None,
    live: str = "",
) -> ModelSource:
    spec, memory = spec_from_config(hf_config, live), memory_for(device)
    if config.max_model_len is not None and config.max_model_len > spec.max_position:
        raise ConfigError(
            f"max_model_len exceeds the model's {spec.max_position} positions",
            got=config.max_model_len,
            fix="Lower it, or leave it out.",
        )
    dtype = dtype or resolve_dtype(config.dtype, hf_config)
    backend = attention_backend(config.attention_backend, torch.device(device), dtype, spec.num_heads)
    store = WeightStore(
        slots(spec),
        dtype=dtype,
        device=device,
        version=config.weight_version,
        reserve=partial(memory.reserve, "weights"),
    )
    return ModelSource(
        path=path,
        hf_config=hf_config,
        spec=spec,
        store=store,
        memory=memory,
        decoder=Decoder(spec, store.weights, backend),
        tokenizer=None,
        eos_ids=eos_ids,
    )


def _randomise(source: ModelSource, config: EngineConfig) -> None:
    randomise(source.store, seed=config.seed, std=getattr(source.hf_config, "initializer_range", 0.02))


def _device(config: EngineConfig) -> torch.device:
    if config.device != "auto":
        device = torch.device(config.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "device is cuda, and torch sees none", got=config.device, fix="Pass device='cpu'."
            )
        return _indexed(device)
    return _indexed(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _indexed(device: torch.device) -> torch.device:
    """The device by number: which one is current differs from thread to thread."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())
