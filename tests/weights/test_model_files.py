"""What a model directory says about itself, read without running its code, or a clear refusal."""

from __future__ import annotations

import json

import huggingface_hub.constants
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.weights import eos_token_ids, find_model, load_tokenizer, read_config, resolve_dtype


@pytest.fixture
def saved(tiny, tmp_path):
    tiny.config("Qwen3", eos_token_id=5).save_pretrained(tmp_path)
    return tmp_path


def test_a_directory_is_found_as_it_is(saved):
    """A path, as text or Path, is the directory itself; a revision for it is refused."""
    assert find_model(saved) == find_model(str(saved)) == saved
    with pytest.raises(ConfigError, match="revision"):
        find_model(saved, revision="main")


@pytest.mark.parametrize("model", ["/no/such/dir", "./no-such", "../no-such", "a/b/c", "two words"])
def test_a_missing_path_never_goes_to_the_hub(monkeypatch, model):
    """E7: what can't be a hub id is a missing path, said so with the path, without a look at the network."""
    monkeypatch.setattr("tokenspeed_rl.weights.model_files.snapshot_download", None)
    with pytest.raises(ConfigError, match="does not exist") as caught:
        find_model(model)
    assert model.removeprefix("./").rsplit("/", 1)[-1] in str(caught.value)


def test_a_file_is_no_directory(saved):
    """E7: the config itself given instead of its directory."""
    with pytest.raises(ConfigError, match="is a file"):
        find_model(saved / "config.json")


def test_offline_the_error_says_what_was_tried(monkeypatch, tmp_path):
    """E7: an unknown id offline: the id, the local path tried, the revision, and the way out."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        find_model("nobody/nothing", revision="v2")
    message = str(caught.value)
    assert "'nobody/nothing'" in message and str(tmp_path / "nobody" / "nothing") in message
    assert "'v2'" in message and "local Hugging Face directory" in message
    assert caught.value.__cause__ is not None


def test_only_safe_files_are_fetched(monkeypatch, tmp_path):
    """A hub id is fetched at its revision: safetensors, JSON and tokenizer text; no pickle, no code."""
    seen = {}

    def fetch(repo, **options):
        seen.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr("tokenspeed_rl.weights.model_files.snapshot_download", fetch)
    assert find_model("org/name", revision="abc") == tmp_path
    assert seen["repo"] == "org/name" and seen["revision"] == "abc"
    files = [
        "model.safetensors",
        "config.json",
        "merges.txt",
        "pytorch_model.bin",
        "modeling.py",
        "original/a.safetensors",
    ]
    kept = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=seen["allow_patterns"], ignore_patterns=seen["ignore_patterns"]
    )
    assert list(kept) == files[:3]


def test_the_config_is_read_as_transformers_reads_it(saved, tiny):
    """The config of a directory is the one that was saved there."""
    config = read_config(saved)
    assert config.to_dict() | {"_name_or_path": ""} == tiny.config("Qwen3", eos_token_id=5).to_dict() | {
        "_name_or_path": "",
        "architectures": config.architectures,
        "transformers_version": config.transformers_version,
    }


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"model_type": "no-such-model"}', '{"model_type": 3}', "\xff"]
)
def test_a_broken_config_is_named(tmp_path, text):
    """E7: an unreadable config or an unknown model type is a ConfigError with the path."""
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError) as caught:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_missing_config_is_named(tmp_path):
    """E7: a directory without config.json."""
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        read_config(tmp_path)


def test_no_code_of_the_models_runs(tmp_path):
    """Contract 6: trust_remote_code is off, whatever the config asks for."""
    mark = tmp_path / "ran"
    (tmp_path / "configuration_evil.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    auto_map = {"AutoConfig": "configuration_evil.EvilConfig"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto_map}))
    with pytest.raises(ConfigError):
        read_config(tmp_path)
    assert not mark.exists()


def test_a_quantised_model_is_refused(saved):
    """Weights with scales beside them are not what the engine computes with."""
    path = saved / "config.json"
    path.write_text(
        json.dumps(
            json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
        )
    )
    with pytest.raises(ConfigError, match="quantization_config"):
        read_config(saved)


@pytest.mark.parametrize("stated", [torch.bfloat16, "bfloat16", torch.float16, torch.float32, None])
def test_auto_is_the_models_own_dtype(tmp_path, stated):
    """Contract 7: dtype "auto" is the model's own, float32 when unstated; a name wins over it."""
    LlamaConfig(dtype=stated).save_pretrained(tmp_path)
    expected = torch.float32 if stated is None else getattr(torch, str(stated).removeprefix("torch."))
    assert resolve_dtype("auto", read_config(tmp_path)) is expected
    assert resolve_dtype("float16", read_config(tmp_path)) is torch.float16


def test_the_older_name_of_the_dtype_counts(saved):
    """Checkpoints written before say torch_dtype."""
    path = saved / "config.json"
    old = {k: v for k, v in json.loads(path.read_text()).items() if k != "dtype"} | {
        "torch_dtype": "bfloat16"
    }
    path.write_text(json.dumps(old))
    assert resolve_dtype("auto", read_config(saved)) is torch.bfloat16


def test_other_dtypes_are_refused():
    """A dtype that the engine has no kernels for."""
    with pytest.raises(ConfigError, match="float64"):
        resolve_dtype("auto", LlamaConfig(dtype="float64"))


def test_all_eos_ids_count_and_sampling_defaults_do_not(saved):
    """F10: generation_config.json's ids first, then the config's, each once; nothing else of it is read."""
    assert eos_token_ids(saved) == (5,)
    sampling = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05, "do_sample": "nonsense"}
    (saved / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5, 9]} | sampling))
    assert eos_token_ids(saved) == (7, 5, 9)
    (saved / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert eos_token_ids(str(saved)) == (5,)


def test_eos_ids_of_live_configs():
    """F10: a live model's two configs are sources as well as a directory; none is ()."""
    assert eos_token_ids(GenerationConfig(eos_token_id=[3, 4]), LlamaConfig(eos_token_id=4)) == (3, 4)
    assert eos_token_ids(LlamaConfig(eos_token_id=None)) == ()
    assert eos_token_ids() == ()


@pytest.mark.parametrize("value", ["2", -1, 1.5, True, [2, None], {"a": 1}])
def test_wrong_eos_ids_are_refused(saved, value):
    """F10: an id that can't be one is an error, not a sequence that never ends."""
    (saved / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigError, match="eos_token_id"):
        eos_token_ids(saved)


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_a_broken_generation_config_is_named(saved, text):
    """E7: it can't be read, so the end of a sequence is unknown: refused."""
    (saved / "generation_config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        eos_token_ids(saved)


def test_tokenizer_of_a_directory_or_none(saved):
    """A tokenizer saved there is loaded; a directory without one gives None; a damaged one is refused."""
    assert load_tokenizer(saved) is None
    vocab = {character: i for i, character in enumerate("abcdefgh")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="a")))
    tokenizer.save_pretrained(saved)
    loaded = load_tokenizer(saved)
    assert loaded is not None and loaded.convert_tokens_to_ids(["c", "h"]) == [2, 7]
    (saved / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=str(saved)):
        load_tokenizer(saved)
