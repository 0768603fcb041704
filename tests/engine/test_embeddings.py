"""Embeddings of a causal LM, beside its generations: transformers' last hidden state, at length 1."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.heads import EXACT, Heads
from tests.tiny import CONFIGS, Tiny
from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.requests import EmbeddingReqInput, GenerateReqInput

PROMPTS = [Tiny.prompt(length, seed=length) for length in (1, 17, 40)]
GREEDY = {"temperature": 0, "max_new_tokens": 8}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("source", ["live", "directory", "config"])
def test_every_family(make_engine: Any, tmp_path: Any, family: str, source: str) -> None:
    """Issue 4, item 2: equal to transformers to 1e-5, and of length 1."""
    model = Heads.model("embedding", family)
    if source == "directory":
        model.save_pretrained(tmp_path)
    engine = make_engine({"live": model, "directory": tmp_path, "config": model.config}[source])
    if source == "config":
        model.load_state_dict(dict(engine.named_parameters()))
    assert engine.client.is_generation is True
    for result in Heads.check(model, engine, PROMPTS):
        assert torch.tensor(result["embedding"]).norm().item() == pytest.approx(1.0, abs=1e-6)
        assert set(result) == {"embedding", "meta_info"}


def test_half_precision_is_normalised_in_float32(make_engine: Any) -> None:
    """Contract 7: of a bfloat16 model the state is rounded, its length isn't."""
    model = Heads.model("embedding", "qwen3").to(torch.bfloat16)
    result = make_engine(model).encode(input_ids=PROMPTS[2])
    assert torch.tensor(result["embedding"]).norm().item() == pytest.approx(1.0, abs=1e-6)
    assert Heads.gap(model, PROMPTS[2], result) < 0.02


@pytest.mark.parametrize("chunk", [1, 3, 16, 41])
@pytest.mark.parametrize("caching", [True, False])
def test_chunks_and_cache(make_engine: Any, chunk: int, caching: bool) -> None:
    """F9's kind: whatever the chunks, and what of the prompt was cached by an embedding or a generation."""
    model, prompt = Heads.model("embedding", "mistral", sliding_window=8), PROMPTS[2]
    engine = make_engine(
        model, chunked_prefill_size=chunk, page_size=4, enable_prefix_caching=caching, max_total_tokens=512
    )
    first, second = (Heads.check(model, engine, [prompt])[0] for _ in range(2))
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens"] == (36 if caching else 0)
    out = engine.generate(input_ids=prompt[:30], sampling_params=GREEDY, return_logprob=True)
    assert out["meta_info"]["cached_tokens"] == (28 if caching else 0)
    assert Tiny.gap(model, prompt[:30], out) < 1e-4
    longer = [*prompt[:30], *out["output_ids"], 1]
    (result,) = Heads.check(model, engine, [longer])
    assert result["meta_info"]["cached_tokens"] == (36 if caching else 0)
    Tiny.all_back(engine)


@pytest.mark.parametrize("first", ["embedding", "generation"])
@pytest.mark.parametrize("chunk", [7, 2048])
def test_a_prompt_embedded_and_gone_on_from_is_computed_once(
    make_engine: Any, first: str, chunk: int
) -> None:
    """F4's kind: one prompt, submitted at once for both, is one computation; both are right."""
    model, prompt = Heads.model("embedding"), PROMPTS[2]
    engine = make_engine(model, page_size=16, chunked_prefill_size=chunk)
    embed = EmbeddingReqInput(input_ids=[prompt, prompt])
    generate = GenerateReqInput(
        input_ids=prompt, sampling_params={"n": 2, "max_new_tokens": 6}, return_logprob=True
    )
    objs = [embed, generate] if first == "embedding" else [generate, embed]
    with Tiny.held(engine):
        streams = [engine.client.generate_request(obj) for obj in objs]
    results = [engine.llm.run(stream.result(20)) for stream in streams]
    embedded, generated = results if first == "embedding" else reversed(results)
    for result in embedded:
        assert Heads.gap(model, prompt, result) < EXACT
    for result in generated:
        assert len(result["output_ids"]) == 6 and Tiny.gap(model, prompt, result) < 1e-4
    assert Tiny.state(engine)["prefill_tokens"] == len(prompt)
    Tiny.all_back(engine)


def test_a_batch_of_both(make_engine: Any, pool: Any) -> None:
    """F12's kind: embeddings among generations: each is what it is alone, and the logits of embedded rows are
    not computed."""
    model = Heads.model("embedding", "qwen3")
    engine = make_engine(model, page_size=4, chunked_prefill_size=64)
    rows, logits = list[int](), engine.client._core.source.decoder.logits
    engine.client._core.source.decoder.logits = lambda hidden: (rows.append(len(hidden)), logits(hidden))[1]
    prompts = [Tiny.prompt(5 + 3 * at, seed=at) for at in range(12)]
    with Tiny.held(engine):
        generating = engine.client.generate_request(
            GenerateReqInput(input_ids=prompts, sampling_params=GREEDY, return_logprob=True)
        )
        embedding = engine.client.generate_request(EmbeddingReqInput(input_ids=prompts[::-1]))
        more = [Tiny.prompt(30, seed=50 + at) for at in range(6)]
        others = engine.client.generate_request(EmbeddingReqInput(input_ids=more))
    for prompt, result in zip(prompts, engine.llm.run(generating.result(20)), strict=True):
        assert Tiny.gap(model, prompt, result) < 1e-4
    embedded = engine.llm.run(embedding.result(20)) + engine.llm.run(others.result(20))
    for prompt, result in zip([*prompts[::-1], *more], embedded, strict=True):
        assert Heads.gap(model, prompt, result) < EXACT
    assert sum(rows) == 12 * 8, "one row of logits for each token drawn, and none else"
    Tiny.all_back(engine)


def test_embeddings_give_way_in_a_small_cache(make_engine: Any) -> None:
    """C3's kind: a pool too small for all: embeddings, younger than what decodes, are retracted for it, and
    start over."""
    model = Heads.model("embedding")
    engine = make_engine(model, page_size=4, max_total_tokens=52, chunked_prefill_size=4)
    old = [Tiny.prompt(4, seed=at) for at in range(2)]
    new = [Tiny.prompt(36, seed=10 + at) for at in range(4)]
    with Tiny.held(engine):
        generating = engine.client.generate_request(
            GenerateReqInput(
                input_ids=old, sampling_params={**GREEDY, "max_new_tokens": 24}, return_logprob=True
            )
        )
        embedding = engine.client.generate_request(EmbeddingReqInput(input_ids=new))
    for prompt, result in zip(old, engine.llm.run(generating.result(20)), strict=True):
        assert len(result["output_ids"]) == 24 and Tiny.gap(model, prompt, result) < 1e-4
    for prompt, result in zip(new, engine.llm.run(embedding.result(20)), strict=True):
        assert Heads.gap(model, prompt, result) < EXACT
    assert Tiny.state(engine)["num_retractions"] > 0
    Tiny.all_back(engine)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep", "retract"])
def test_updated_under_a_pause(make_engine: Any, step_gate: Any, mode: str) -> None:
    """C6, D1: an embedding in flight under each pause, and an update in it: the old one's, of an abort
    nothing, or all of it anew; and nobody reads KV of before."""
    model = Heads.model("embedding")
    before, prompt = copy.deepcopy(model), PROMPTS[2]
    engine = make_engine(model, page_size=4, chunked_prefill_size=8)
    with step_gate(engine) as gate:
        stream = engine.client.generate_request(EmbeddingReqInput(input_ids=prompt))
        gate.step(2)
        gate.wait()
        pausing = Tiny.after_step(engine, 1, lambda: engine.pause(mode))
        gate.open()
        assert pausing.result(20)
    Heads.train(model)
    engine.weights_changed()
    engine.resume()
    result = engine.llm.run(stream.result(20))
    if mode == "abort":
        assert result["embedding"] == [] and result["meta_info"]["finish_reason"]["type"] == "abort"
    else:
        assert Heads.gap(before if mode == "wait" else model, prompt, result) < EXACT
    assert result["meta_info"]["weight_version"] == ("1" if mode in ("keep", "retract") else "default")
    (again,) = Heads.check(model, engine, [prompt])
    assert again["meta_info"]["cached_tokens"] == (36 if mode in ("keep", "retract") else 0)


def test_a_state_that_is_no_number_ends_alone(make_engine: Any) -> None:
    """F7: embeddings as generations: abort, saying so; neighbours exact; nothing of it kept."""
    model = Heads.model("embedding")
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
    engine = make_engine(model, page_size=4)
    good, bad = [9, 8, 6, 5, 4], [9, 8, 6, 5, 7, 4, 3, 2, 1]
    for order in (1, -1, 1):
        first, broken = engine.encode(input_ids=[good, bad][::order])[::order]
        assert broken["embedding"] == []
        reason = broken["meta_info"]["finish_reason"]
        assert reason == {"type": "abort", "message": "the model's hidden states are not finite"}
        assert broken["meta_info"]["cached_tokens"] <= 4
        assert Heads.gap(model, good, first) < EXACT
    Tiny.all_back(engine)


def test_lists_ids_and_text(engine: Any, model: Any) -> None:
    """Contract 3, 4: a prompt gives a dict and a list a list, also of one; rids are the caller's; text is
    tokenised; what is malformed is refused."""
    single = engine.encode("ab", rid="mine")
    assert single["meta_info"]["id"] == "mine" and Heads.gap(model, [97, 98], single) < EXACT
    (listed,) = engine.encode(["ab"], rid=["yours"], use_tqdm=True)
    assert listed["meta_info"]["id"] == "yours"
    assert listed["embedding"] == pytest.approx(single["embedding"], abs=1e-6)
    tensors = engine.encode(input_ids=torch.tensor([[1, 2], [3, 4]]))
    assert [result["meta_info"]["prompt_tokens"] for result in tensors] == [2, 2]
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "text or input_ids"),
        ({"input_ids": []}, "non-empty"),
        ({"input_ids": [256]}, "256"),
        ({"prompt": "a", "input_ids": [1]}, "only one"),
        ({"input_ids": [1], "sampling_params": {}}, "sampling_params"),
        ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "rids must differ"),
        ({"input_ids": [1], "timeout": -1}, "timeout"),
        ({"input_ids": Tiny.prompt(257)}, "257 tokens"),
    ]
    for arguments, words in refused:
        with pytest.raises(RequestError, match=words):
            engine.encode(**arguments)
    Tiny.all_back(engine)


def test_it_counts_as_output(make_engine: Any) -> None:
    """Contract 2: `last_receive_tstamp` is that of the loop's last output, an embedding too."""
    engine = make_engine(Heads.model("embedding"))
    assert engine.client.last_receive_tstamp == 0.0
    result = engine.encode(input_ids=[1, 2])
    assert engine.client.last_receive_tstamp > 0.0
    assert 0.0 < result["meta_info"]["e2e_latency"] < 60.0
