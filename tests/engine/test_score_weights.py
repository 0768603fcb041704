"""Weights of reward and value models: updated, shared, released and woken like any other model's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.heads import EXACT, Heads
from tests.tiny import Tiny
from tokenspeed_rl.errors import ConfigError, RequestError, WeightUpdateError
from tokenspeed_rl.requests import EmbeddingReqInput, GenerateReqInput
from tokenspeed_rl.weights import checksum

PROMPTS = [Tiny.prompt(length, seed=length) for length in (1, 17, 40)]


# Updates, pauses, sleep


@pytest.mark.parametrize("reading", ["score", "values"])
@pytest.mark.parametrize("mode", [None, "retract", "keep"])
@pytest.mark.parametrize("after", [1, 3])
def test_an_update_in_the_midst_of_a_prompt(
    make_engine: Any, step_gate: Any, pool: Any, reading: str, mode: str | None, after: int
) -> None:
    """D3's kind: a reading is of one version of the weights: what was read before the update is read again,
    also under a pause that keeps."""
    old, new = Heads.model(reading, seed=0), Heads.model(reading, seed=1)
    config = copy.deepcopy(old.config)
    config.architectures = [type(old).__name__]
    engine = make_engine(config, chunked_prefill_size=4, page_size=4)
    engine.update_weights_from_tensor(Heads.named(old))
    with step_gate(engine) as gate:
        stream = engine.client.generate_request(EmbeddingReqInput(input_ids=[PROMPTS[2]] * 2))
        gate.commanded()  # by the first request: to map the KV cache
        gate.step(after)
        gate.wait()
        if mode is not None:
            pausing = Tiny.after_step(engine, 1, lambda: engine.pause(mode))
            gate.step(2)  # the one at the gate, and the one that it counts
            assert pausing.result(20)
            engine.update_weights_from_tensor(Heads.named(new))
            gate.open()
            engine.resume()
        else:
            updating = pool.submit(engine.update_weights_from_tensor, Heads.named(new))
            gate.serve(updating.done)
            updating.result(20)
            gate.open()
    for result in engine.llm.run(stream.result(20)):
        assert result["meta_info"]["weight_version"] == "2"
        assert Heads.gap(new, PROMPTS[2], result) < EXACT


@pytest.mark.parametrize("mode", ["retract", "keep"])
def test_an_update_says_how_many_begin_again(
    make_engine: Any, step_gate: Any, tmp_path: Any, mode: str
) -> None:
    """Contract 2: the third item of an update from disk; a pause that keeps has sent nothing back before."""
    model = Heads.model("score")
    model.save_pretrained(tmp_path)
    engine = make_engine(tmp_path, chunked_prefill_size=4, page_size=4)
    with step_gate(engine) as gate:
        stream = engine.client.generate_request(EmbeddingReqInput(input_ids=[PROMPTS[2]] * 2))
        gate.step()
        gate.wait()
        pausing = Tiny.after_step(engine, 1, lambda: engine.pause(mode))
        gate.step(2)
        assert pausing.result(20)
        done = engine.update_weights_from_disk(str(tmp_path))
        assert done[2] == {"retract": 0, "keep": 2}[mode]
        gate.open()
        engine.resume()
    for result in engine.llm.run(stream.result(20)):
        assert Heads.gap(model, PROMPTS[2], result) < EXACT


@pytest.mark.parametrize("backup", ["none", "cpu"])
def test_release_and_wake(make_engine: Any, tmp_path: Any, backup: str) -> None:
    """Issue 4: released and woken like any other model: with a backup as it was, without one invalid until a
    complete update."""
    model = Heads.model("values", num_labels=2)
    model.save_pretrained(tmp_path)
    engine = make_engine(tmp_path, weights_backup=backup)
    Heads.check(model, engine, PROMPTS)
    before = engine.weights_checksum()
    engine.release_memory_occupation()
    waiting = engine.client.generate_request(EmbeddingReqInput(input_ids=PROMPTS[0]))
    engine.resume_memory_occupation()
    if backup == "none":
        engine.update_weights_from_tensor(Heads.named(model), weight_version="new")
    assert Heads.gap(model, PROMPTS[0], engine.llm.run(waiting.result(20))) < EXACT
    Heads.check(model, engine, PROMPTS)
    assert engine.weights_checksum() == before


@pytest.mark.parametrize("mode", ["keep", "retract"])
@pytest.mark.parametrize("reading", ["score", "values"])
def test_asleep_in_the_midst_of_a_prompt(make_engine: Any, step_gate: Any, reading: str, mode: str) -> None:
    """Contract 5: a release of the KV sends it back, half read; after wake and resume it is whole, each value
    once."""
    model = Heads.model(reading)
    engine = make_engine(model, chunked_prefill_size=8, page_size=4)
    with step_gate(engine) as gate:
        stream = engine.client.generate_request(EmbeddingReqInput(input_ids=[PROMPTS[2]] * 2))
        gate.step(2)
        gate.wait()
        pausing = Tiny.after_step(engine, 1, lambda: engine.pause(mode))
        gate.step(2)
        assert pausing.result(20)
        gate.open()
    engine.release_memory_occupation("kv_cache")
    engine.resume_memory_occupation()
    engine.resume()
    for result in engine.llm.run(stream.result(20)):
        assert Heads.gap(model, PROMPTS[2], result) < EXACT
    Tiny.all_back(engine)


def test_updates_by_hugging_face_names(make_engine: Any, tmp_path: Any) -> None:
    """Contract 6: the head is a weight like any other: updated by tensors and from disk, in any bucketing,
    read by name, missed where it is missing."""
    old, new = Heads.model("values", seed=0, num_labels=2), Heads.model("values", seed=1, num_labels=2)
    old.save_pretrained(tmp_path / "old")
    new.save_pretrained(tmp_path / "new")
    engine = make_engine(tmp_path / "old")
    weights = Heads.named(new)
    receipt = engine.update_weights_from_tensor(iter(reversed(list(weights.items())))).report
    assert receipt.missing == () and {"score.weight", "score.bias"} <= set(receipt.loaded)
    Heads.check(new, engine, PROMPTS)
    assert engine.weights_checksum() == checksum(new.named_parameters())
    read = engine.get_weights_by_name("score.weight")
    assert torch.equal(torch.as_tensor(read), new.score.weight)
    engine.update_weights_from_disk(str(tmp_path / "old"))
    Heads.check(old, engine, PROMPTS)
    headless = {name: tensor for name, tensor in weights.items() if "score" not in name}
    with pytest.raises(WeightUpdateError, match=r"2 missing.*score\.weight"):
        engine.update_weights_from_tensor(headless)
    with pytest.raises(WeightUpdateError, match=r"unknown: lm_head\.weight"):
        engine.update_weights_from_tensor({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    Tiny.model().save_pretrained(tmp_path / "causal")
    with pytest.raises(WeightUpdateError, match="architecture is 'LlamaForCausalLM'"):
        engine.update_weights_from_disk(str(tmp_path / "causal"))
    Heads.check(old, engine, PROMPTS)


@pytest.mark.parametrize("reading", ["score", "values"])
def test_a_live_model_that_is_trained(make_engine: Any, reading: str) -> None:
    """Contract 6: an optimiser's step on a shared reward or value model is seen after `weights_changed`; its
    dropout is the trainer's alone."""
    model = Heads.model(reading)
    engine = make_engine(model, page_size=4)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine.watch(optimizer)
    for step in range(3):
        model(input_ids=torch.tensor([PROMPTS[1]])).logits.square().sum().backward()
        optimizer.step()
        model.eval()
        results = Heads.check(model, engine, PROMPTS)
        model.train()
        assert {result["meta_info"]["weight_version"] for result in results} == {str(step + 1)}
        assert {result["meta_info"]["cached_tokens"] for result in results} == {0}
        optimizer.zero_grad()


# Refused


def test_what_scores_does_not_generate(make_engine: Any) -> None:
    """Contract 3: refused by what, got and fix, and nothing is lost."""
    model = Heads.model("score")
    engine = make_engine(model, tokenizer=Tiny.tokenizer())
    calls = [
        lambda: engine.generate(input_ids=[1]),
        lambda: engine.generate("a", stream=True),
        lambda: engine.client.generate_request(GenerateReqInput(input_ids=[1])),
        lambda: engine.chat([{"role": "user", "content": "a"}], chat_template="a"),
    ]
    for call in calls:
        with pytest.raises(RequestError, match=r"scores and doesn't generate.*EmbeddingReqInput.*encode"):
            call()
    Heads.check(model, engine, PROMPTS)
    assert engine.encode("abc")["score"] == engine.encode(input_ids=[97, 98, 99])["score"]


def test_other_heads_are_refused_by_name(make_engine: Any, tmp_path: Any) -> None:
    """Issue 4, item 2: a head of another name or shape, in files or in a live module."""
    model = Heads.model("score")
    state = {**Heads.named(model), "v_head.weight": torch.zeros(1, 64)}
    model.save_pretrained(tmp_path / "v_head", state_dict=state)
    with pytest.raises(WeightUpdateError, match=r"v_head\.weight"):
        make_engine(tmp_path / "v_head")
    config = AutoConfig.from_pretrained(tmp_path / "v_head")
    config.architectures = ["LlamaForRewardModel"]
    with pytest.raises(ConfigError, match="LlamaForRewardModel"):
        make_engine(config)
    model.v_head = torch.nn.Linear(64, 1)
    with pytest.raises(ConfigError, match="v_head"):
        make_engine(model)
    del model.v_head
    model.score = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    with pytest.raises(ConfigError, match="score"):
        make_engine(model)
    tokens = Heads.model("values")
    tokens.dropout.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="dropout has a forward hook"):
        make_engine(tokens)


def test_another_kind_of_module_is_not_shared(make_engine: Any) -> None:
    """Contract 6: an engine of a reward model takes no causal LM, nor the other way round."""
    rewards = make_engine(Heads.model("score"))
    for other in (Tiny.model(), Heads.model("values"), Heads.model("score", num_labels=2)):
        with pytest.raises(ConfigError):
            rewards.share_weights(other)
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        make_engine(Tiny.model()).share_weights(Heads.model("score"))
    again = Heads.model("score", seed=4)
    rewards.share_weights(again)
    Heads.check(again, rewards, PROMPTS)
