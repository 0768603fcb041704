"""`python -m tokenspeed_rl replay`: what was dumped, run again."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.__main__ import main
from tokenspeed_rl.replay import compare, read_dump, replay


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`model` and `dump`: greedy and drawn samples, with and without seeds, of several per prompt, under
    filters, bias, stop strings and minimum lengths, with a cache that is too small, one of them aborted."""
    folder = tmp_path_factory.mktemp("replay")
    model = Tiny.model()
    model.save_pretrained(folder / "model")
    Tiny.tokenizer().save_pretrained(folder / "model")
    prompts = [Tiny.prompt(9, seed) for seed in range(6)]
    params: list[dict[str, Any]] = [
        {"temperature": 0},
        {"n": 3},
        {"seed": 5, "n": 2, "temperature": 0.7, "top_p": 0.9},
        {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 2**64 - 1},
        {"logit_bias": {65: 4.0, 66: -float("inf")}, "stop": ["A"], "min_new_tokens": 5},
        {"stop_token_ids": list(range(0, 256, 9)), "presence_penalty": 0.3},
    ]
    with Engine(str(folder / "model"), page_size=4, max_total_tokens=80, seed=11) as engine:
        engine.configure_logging(dump_requests_folder=str(folder / "dump"), dump_requests_threshold=4)
        asked = [{"max_new_tokens": 16, **each} for each in params]
        engine.generate(input_ids=prompts, sampling_params=asked, return_logprob=True)
        stream = engine.generate(input_ids=prompts[0], sampling_params={"max_new_tokens": 60}, stream=True)
        for _ in range(3):
            next(stream)
        stream.close()
        engine.generate(input_ids=[7, 7], sampling_params={"max_new_tokens": 0})
        engine.encode(input_ids=[7, 8])
        assert Tiny.state(engine)["num_preemptions"] > 0
    yield folder


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["tokenspeed_rl", "replay", *map(str, arguments)])
    return main()


def lines(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "dump").iterdir())
    every = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(every) == 12 and len(every[-1]["embedding"]) == 64, "dumped, but not to be replayed"
    return every[:-1]


def test_the_same_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every sample draws the same tokens: alone where it was one of several, with another engine seed,
    without its batch mates or the retractions, and cut where it was."""
    assert len(lines(folder)) == 11
    assert {line["meta_info"]["finish_reason"]["type"] for line in lines(folder)} == {
        *("length", "stop", "abort")
    }
    assert run(monkeypatch, folder / "dump", "--model", folder / "model") == 0
    (last,) = capsys.readouterr().out.splitlines()
    assert last.startswith("11 of 11 samples are the same (ids, and logprobs to 0.001); logprobs differ by ")
    assert float(last.split()[-3]) < 1e-4


def test_a_seed_in_the_dump_is_the_one_drawn_with(folder: Path) -> None:
    """Any engine that is given it as an explicit seed draws what a sample drew that had none."""
    with Engine(str(folder / "model"), seed=99) as engine:
        for line in lines(folder)[:5]:
            fields = {**line["sampling_params"], "n": 1, "seed": line["seed"]}
            result = engine.generate(input_ids=line["input_ids"], sampling_params=fields)
            assert result["output_ids"] == line["output_ids"] and result["text"] == line["text"]


def test_other_weights_are_found_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Exit 1, and a row for each sample that differs, with where it does first."""
    Tiny.model(seed=1).save_pretrained(tmp_path)
    Tiny.tokenizer().save_pretrained(tmp_path)
    (greedy,) = [line for line in lines(folder) if line["sampling_params"]["temperature"] == 0]
    file = tmp_path / "one.jsonl"
    greedy["output_ids"][4] ^= 1
    file.write_text(json.dumps(greedy) + "\n")
    assert run(monkeypatch, file, "--model", folder / "model") == 1
    head, row, last = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["sample", "weights", "tokens"]
    assert row.split()[:4] == [f"{greedy['rid']}[0]", "default", "16", "4"]
    assert last.startswith("0 of 1 samples are the same")
    assert run(monkeypatch, folder / "dump", "--model", tmp_path, "--limit", 8) == 1
    assert "0 of 8 samples" in capsys.readouterr().out


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_is_positive(folder: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Nothing compared is nothing proved: no exit 0 for it."""
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, folder / "dump", "--model", folder / "model", "--limit", limit)
    assert ended.value.code == 2


def test_logprobs_count_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The same tokens with another logprob differ, beyond the tolerance."""
    (line,) = [line for line in lines(folder) if line["sampling_params"]["temperature"] == 0]
    line["meta_info"]["output_token_logprobs"][2][0] -= 0.01
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps(line) + "\n")
    assert run(monkeypatch, file, "--model", folder / "model") == 1
    assert "1.0e-02" in capsys.readouterr().out
    assert run(monkeypatch, file, "--model", folder / "model", "--tolerance", 0.02) == 0


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("max_new_tokens",), None),
        (("max_new_tokens",), "a"),
        (("seed",), True),
        (("sampling_params", "min_new_tokens"), None),
        (("meta_info", "finish_reason"), "abort"),
        (("meta_info", "id"), None),
        (("meta_info", "weight_versions"), [{}]),
        (("meta_info", "lora"), 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("gone", [False, True])
def test_a_broken_line_is_refused(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    path: tuple[str, ...],
    value: object,
    gone: bool,
) -> None:
    """Exit 2 with its place, whatever in it is missing or of another type: 1 would mean that it differs."""
    line = lines(folder)[0]
    holder = line
    for name in path[:-1]:
        holder = holder[name]
    if gone and path[-1] != "lora":
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps(line) + "\n")
    assert run(monkeypatch, file, "--model", folder / "model") == 2
    assert f"{file}:1" in capsys.readouterr().err


def test_a_line_that_is_nested_too_deep(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "one.jsonl"
    file.write_text("[" * 100_000)
    assert run(monkeypatch, file, "--model", "/nowhere") == 2
    assert f"{file}:1" in capsys.readouterr().err


def test_adapters_are_replayed_with_theirs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Samples of the base model and of an adapter, in one dump, on an engine that shares the module."""
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    module = get_peft_model(Tiny.model(), config, adapter_name="policy")
    with Engine(module, max_total_tokens=512, dump_requests_folder=str(tmp_path)) as engine:
        for adapter in ("policy", None, "policy"):
            engine.generate(
                input_ids=Tiny.prompt(7),
                sampling_params={"max_new_tokens": 9},
                lora=adapter,
                return_logprob=True,
            )
    samples = read_dump(tmp_path)
    assert [sample["meta_info"].get("lora") for sample in samples] == ["policy", None, "policy"]
    with Engine(module, max_total_tokens=512) as engine:
        again = replay(engine, samples)
    assert all(compare(then, now).within(1e-4) for then, now in zip(samples, again, strict=True))
    Tiny.model().save_pretrained(tmp_path / "base")
    assert run(monkeypatch, tmp_path, "--model", tmp_path / "base") == 0
    told = capsys.readouterr().out
    assert "2 of 3 samples are of adapters" in told and "1 of 1 samples are the same" in told


@pytest.mark.parametrize("content", [None, "", "{}\n", "no json\n", '{"input_ids": 3, "output_ids": []}\n'])
def test_what_is_no_dump(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str | None
) -> None:
    """Exit 2 and one line that names the place, before any model is loaded."""
    file = tmp_path / "dump.jsonl"
    if content is not None:
        file.write_text(content)
    assert run(monkeypatch, file, "--model", "/nowhere") == 2
    error = capsys.readouterr().err
    assert error.startswith("RequestError: ") and "dump.jsonl" in error
