"""The command line: python -m tokenspeed_rl."""

import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tokenspeed_rl.__main__ import main

WORDS = ["<s>", "</s>", "red", "green", "blue", "one", "two", "three"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama whose eight tokens are words."""
    folder = tmp_path_factory.mktemp("model")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<s>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = LlamaConfig(
            vocab_size=8, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=32, bos_token_id=0, eos_token_id=1,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tokenspeed_rl", *arguments])
    return main()


def test_generate_prints_what_transformers_would(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each prompt is printed with its greedy completion, which is that of transformers' own `generate`."""
    model = LlamaForCausalLM.from_pretrained(model_dir)
    prompts = {"red green": [2, 3], "three blue one": [7, 4, 5]}
    expected = []
    for prompt, ids in prompts.items():
        output = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[
            0, len(ids) :
        ].tolist()
        expected.append(prompt + "".join(WORDS[i] for i in output if i > 1))
    assert run(monkeypatch, "generate", str(model_dir), *prompts, "--max-new-tokens", "6") == 0
    printed = capsys.readouterr()
    assert [text.replace(" ", "") for text in printed.out.split("\n\n")[:2]] == [
        e.replace(" ", "") for e in expected
    ]
    assert "tokens/s" in printed.err


def test_refusals_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A missing model or a bad value ends with status 2 and the error's text, not with a traceback."""
    assert run(monkeypatch, "generate", str(tmp_path / "missing"), "red") == 2
    assert "missing" in capsys.readouterr().err
    assert run(monkeypatch, "generate", str(tmp_path), "red", "--dtype", "fp8") == 2
    assert capsys.readouterr().err.startswith("ConfigError: dtype")


def test_plot_draws_the_curves_of_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """curve.png comes out of metrics.jsonl alone, also mid-run; a folder without one is refused."""
    assert run(monkeypatch, "plot", str(tmp_path)) == 2
    rows = '{"step": 1, "reward": 0.1, "kl": null}\n{"step": 2, "reward": 0.5}\n'
    (tmp_path / "metrics.jsonl").write_text(rows)
    assert run(monkeypatch, "plot", str(tmp_path)) == 0
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.strip() == str(tmp_path / "curve.png")
    assert run(monkeypatch, "plot", str(tmp_path), "--metrics", "loss") == 2


def test_env_names_what_matters(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A bug report needs this table: versions, threads, memory and devices."""
    assert run(monkeypatch, "env") == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["torch"] == torch.__version__
    assert {"tokenspeed_rl", "python", "transformers", "triton", "deepspeed", "cpu", "memory"} <= set(rows)
