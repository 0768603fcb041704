"""No engine can be built so: the error says what, got and fix, and nothing is left of the try."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, PretrainedConfig

from tokenspeed_rl import AsyncLLM, Engine, EngineConfig
from tokenspeed_rl.errors import (
    ConfigError,
    OutOfMemoryError,
    TokenSpeedError,
    WeightUpdateError,
)

GREEDY = {"temperature": 0, "max_new_tokens": 4}
MODELS: dict[str, tuple[Any, str]] = {
    "number": (5, "model must be a directory, a hub id"),
    "none": (None, "model must be a directory, a hub id"),
    "config class": (PretrainedConfig, "model must be a directory, a hub id"),
    "some module": (torch.nn.Linear(2, 2), "must be a transformers causal LM"),
    "missing directory": ("/nowhere/at all", "does not exist"),
    "unsupported config": (
        GPT2Config(),
        "gpt2.*Supported: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
    ),
}
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"max_toknes": 5}, "Did you mean"),
    "wrong type": ({"page_size": "16"}, "page_size must be of type int"),
    "out of range": ({"mem_fraction": 2.0}, "mem_fraction must be above 0 and at most 1"),
    "two at once": ({"page_size": 0, "seed": -1}, "(?s)page_size.*seed"),
    "later": ({"tp_size": 2}, "tp_size must be 1"),
    "no config": ({"config": {"page_size": 16}}, "config must be an EngineConfig"),
    "process group": ({"process_group": object()}, "process_group"),
    "dtype of a live model": ({"dtype": "bfloat16"}, "live model is float32.*got 'bfloat16'"),
    "device of a live model": ({"device": "cuda"}, "live model is on cpu.*got 'cuda'"),
    "context": ({"max_model_len": 257}, "256 positions.*got 257"),
    "less than a page": ({"max_total_tokens": 15}, "max_total_tokens must be at least page_size, 16"),
    "another model's path": ({"model_path": "/some/model"}, "model_path names another model"),
    "revision of a live model": ({"revision": "main"}, "revision is for hub ids"),
    "format of a live model": ({"load_format": "dummy"}, "a live model has its weights"),
    "no tokenizer": ({"tokenizer": "gpt2"}, "tokenizer must be a transformers tokenizer"),
}


def refused(error: type[TokenSpeedError], message: str, model: Any, **settings: Any) -> None:
    """Neither engine can be built so, and nothing is left of the tries."""
    before = set(threading.enumerate())
    for kind in (Engine, AsyncLLM):
        with pytest.raises(error, match=message):
            kind(model, **settings)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("name", MODELS)
def test_bad_models(name: str) -> None:
    """Issue 2: what is no model, isn't there or isn't supported (the error lists what is)."""
    model, message = MODELS[name]
    refused(ConfigError, message, model)


@pytest.mark.parametrize("name", SETTINGS)
def test_bad_settings(tiny: Any, make_engine: Any, name: str) -> None:
    """Issue 2: unknown, malformed and contradictory settings are refused, none is ignored, and the live model
    is left as it was."""
    settings, message = SETTINGS[name]
    model = tiny.successor()
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    refused(ConfigError, message, model, **settings)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert make_engine(model).generate(input_ids=[1], sampling_params={**GREEDY, "max_new_tokens": 1})


def test_a_tokenizer_that_would_be_ignored(tiny: Any) -> None:
    """A tokenizer beside `skip_tokenizer_init=True`, and files for a config, contradict each other."""
    refused(
        ConfigError, "skip_tokenizer_init", tiny.model(), tokenizer=tiny.tokenizer(), skip_tokenizer_init=True
    )
    refused(ConfigError, "a config has no files", tiny.config(), load_format="safetensors")


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return edit


FILES: dict[str, tuple[Callable[[Path], Any], type[TokenSpeedError], str]] = {
    "truncated": (truncate, ConfigError, "truncated"),
    "empty": (lambda d: (d / "model.safetensors").write_bytes(b""), ConfigError, "no intact safetensors"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), ConfigError, "holds neither"),
    "no config": (lambda d: (d / "config.json").unlink(), ConfigError, "config.json is missing"),
    "broken config": (lambda d: (d / "config.json").write_text("{"), ConfigError, "can't be read"),
    "unsupported": (
        edit_config(architectures=["GPT2LMHeadModel"], model_type="gpt2"),
        ConfigError,
        "GPT2LMHeadModel.*Supported: LlamaForCausalLM, Mistral",
    ),
    "too few layers": (edit_config(num_hidden_layers=3), WeightUpdateError, "9 missing"),
    "another size": (edit_config(vocab_size=300), WeightUpdateError, "mis-shaped"),
}


@pytest.mark.parametrize("name", FILES)
def test_bad_files(tiny: Any, tmp_path: Path, name: str) -> None:
    """Issue 2: a truncated, incomplete or unsupported model directory names the file or the tensors."""
    spoil, error, message = FILES[name]
    tiny.model().save_pretrained(tmp_path)
    spoil(tmp_path)
    refused(error, message, tmp_path)
    refused(error, message, str(tmp_path))


def test_a_cache_that_can_not_be_allocated(tiny: Any, make_engine: Any) -> None:
    """A cache for which there are not even addresses, or no memory, is an OutOfMemoryError with what was
    wanted: at construction, or at the first generate, after which the engine lives."""
    with pytest.raises(OutOfMemoryError) as caught:
        make_engine(tiny.successor(), max_total_tokens=1 << 52)
    assert caught.value.wanted > 1 << 52
    huge = 1 << 32
    engine = make_engine(tiny.successor(), max_total_tokens=huge)
    for _ in range(2):
        with pytest.raises(OutOfMemoryError) as caught:
            engine.generate(input_ids=[1])
        assert caught.value.wanted > huge
    assert engine.get_load()[0].num_reqs == 0


def test_the_callers_config_stays_the_callers(tiny: Any, make_engine: Any) -> None:
    """Overrides and running change nothing in the config, the parameters or the ids that were passed."""
    config, ids, sampling = EngineConfig(page_size=8), [[1, 2], [3]], {"n": 2, "max_new_tokens": 2}
    engine = make_engine(tiny.model(), config=config, seed=5)
    engine.generate(input_ids=ids, sampling_params=sampling)
    assert config == EngineConfig(page_size=8)
    assert ids == [[1, 2], [3]] and sampling == {"n": 2, "max_new_tokens": 2}
    assert engine.client.server_args.seed == 5 and engine.client.server_args.page_size == 8
