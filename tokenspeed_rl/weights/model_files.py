"""A model's files beside its weights: the directory, config, dtype, end-of-sequence ids and tokenizer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from tokenspeed_rl.errors import ConfigError

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
_HUB_REFUSED = ["*/*", "consolidated*"]  # copies in other layouts, which the engine doesn't read
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def find_model(model: str | Path, revision: str | None = None) -> Path:
    """The local directory of `model`: a directory, or a hub id whose safetensors and JSON files are fetched.

    Args:
        model: path of a Hugging Face directory, or ``"organisation/name"``.
        revision: branch, tag or commit of a hub id; refused for a directory.

    Raises:
        ConfigError: there is no such directory and no such model on the hub or in the hub's local cache.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ConfigError(
                f"revision is for hub ids, and {path} is a directory", got=revision, fix="Leave revision out."
            )
        return path
    if path.exists():
        raise ConfigError(f"{path} is a file, not a model directory", fix="Pass the directory that holds it.")
    if not isinstance(model, str) or not _HUB_ID.fullmatch(model):
        raise ConfigError(
            f"{path.absolute()} does not exist", fix="Pass a Hugging Face directory or a hub id 'org/name'."
        )
    try:
        return Path(
            snapshot_download(
                model, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_REFUSED
            )
        )
    except Exception as error:  # the hub client and its HTTP library raise kinds of their own
        at = f" at revision {revision!r}" if revision else ""
        raise ConfigError(
            f"{model!r} is no directory here (tried {path.absolute()}), and fetching it{at} from the hub "
            f"failed: {_first_line(error)}",
            fix="Check the name, log in, or when offline pass the path of a local Hugging Face directory.",
        ) from error


def read_config(directory: Path) -> PretrainedConfig:
    """The transformers config in `directory`; no code of the model's is run.

    Raises:
        ConfigError: config.json is missing, unreadable, of an unknown model type, or says the weights are
            quantised.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} is missing", fix="Pass a directory that save_pretrained wrote.")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and kinds of its own
        raise ConfigError(
            f"{path} can't be read as a model config: {_first_line(error)}",
            fix="It must be JSON with a model_type that transformers knows without remote code.",
        ) from error
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{path} has a quantization_config, and quantised weights are not supported",
            fix="Dequantise the model, drop config.quantization_config, and save it again.",
        )
    return config


def resolve_dtype(dtype: str, config: PretrainedConfig) -> torch.dtype:
    """The weights' dtype: `dtype` by name, or for ``"auto"`` the config's own, float32 when it states none.

    Raises:
        ConfigError: a dtype other than float32, bfloat16 and float16.
    """
    stated = getattr(config, "dtype", None) if dtype == "auto" else dtype
    name = "float32" if stated is None else str(stated).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(
            "dtype must be float32, bfloat16 or float16",
            got=name,
            fix="Pass dtype='bfloat16', say, to cast to it.",
        )
    return _DTYPES[name]


def eos_token_ids(*sources: Path | str | object) -> tuple[int, ...]:
    """End-of-sequence ids that the sources name, each once, in order; () when none does.

    Args:
        sources: model directories (their generation_config.json, then config.json), or transformers model or
            generation configs. Nothing else of a generation config, such as its sampling defaults, is read.

    Raises:
        ConfigError: a file that isn't a JSON object, or ids that aren't integers >= 0.
    """
    found: dict[int, None] = {}
    for source in sources:
        if isinstance(source, str | Path):
            stated: list[tuple[object, Any]]
            files = [Path(source) / name for name in ("generation_config.json", "config.json")]
            stated = [(file, _json_object(file).get("eos_token_id")) for file in files if file.is_file()]
        else:
            stated = [(type(source).__name__, getattr(source, "eos_token_id", None))]
        for place, value in stated:
            found.update(dict.fromkeys(_ids(place, value)))
    return tuple(found)


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer saved in `directory`, None when there is none; no code of the model's is run.

    Raises:
        ConfigError: the directory has a tokenizer's files, but they can't be loaded.
    """
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise kinds of their own
        raise ConfigError(
            f"the tokenizer in {directory} can't be loaded: {_first_line(error)}",
            fix="Repair its files, pass tokenizer=..., or set skip_tokenizer_init=True to work with ids.",
        ) from error
    return tokenizer


def _ids(place: object, value: object) -> list[int]:
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ConfigError(
            f"eos_token_id in {place} must be a token id or a list of them",
            got=value,
            fix="Correct it there.",
        )
    return list(ids)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", fix="Repair or remove the file.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object", got=content, fix="Repair or remove the file.")
    return content


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
