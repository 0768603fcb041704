"""Reward and value models score through the engine as transformers scores, however the work is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.heads import AUTO, EXACT, Heads
from tests.tiny import CONFIGS, Tiny
from tokenspeed_rl.errors import EngineTimeoutError, RequestError
from tokenspeed_rl.requests import EmbeddingReqInput

LENGTHS = (1, 17, 40)
PROMPTS = [Tiny.prompt(length, seed=length) for length in LENGTHS]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "reward": ("score", {"num_labels": 1}),
    "three scores": ("score", {"num_labels": 3}),
    "value": ("values", {"num_labels": 1}),
    "three values": ("values", {"num_labels": 3}),
    "value without a bias": ("values", {"num_labels": 1, "token_classification_bias": False}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("source", ["live", "directory"])
def test_every_family_and_head(make_engine: Any, tmp_path: Any, family: str, kind: str, source: str) -> None:
    """Issue 4, item 2: scores equal transformers' to 1e-5, of a live module (weights shared) or a directory,
    tied embeddings or not."""
    reading, options = KINDS[kind]
    model = Heads.model(reading, family, tie_word_embeddings=family == "qwen2", **options)
    if source == "directory":
        model.save_pretrained(tmp_path)
    engine = make_engine(model if source == "live" else tmp_path)
    assert engine.client.is_generation is False
    Heads.check(model, engine, PROMPTS)
    assert {name for name, _ in engine.named_parameters()} == set(Heads.named(model))
    if source == "live":
        assert engine.memory_report()["weights"]["owner"] == "trainer"
        for name, parameter in model.named_parameters():
            assert dict(engine.named_parameters())[name].data_ptr() == parameter.data_ptr()


@pytest.mark.parametrize("reading", ["score", "values"])
@pytest.mark.parametrize("family", CONFIGS)
def test_from_a_config(make_engine: Any, family: str, reading: str) -> None:
    """Contract 1: `architectures` says which head; the seeded random weights are what is computed with."""
    name = type(Heads.model(reading, family)).__name__
    config = Tiny.config(family, num_labels=2, architectures=[name])
    engine = make_engine(config, seed=3)
    model = AUTO[reading].from_config(config).eval()
    model.load_state_dict(dict(engine.named_parameters()))
    assert type(model).__name__ == name
    Heads.check(model, engine, PROMPTS)
    assert engine.weights_checksum() == make_engine(config, seed=3).weights_checksum()


def test_half_precision_follows_its_own_model(make_engine: Any) -> None:
    """Contract 7: in bfloat16 the score is the module's, up to its rounding."""
    model = Heads.model("values").to(torch.bfloat16)
    result = make_engine(model).encode(input_ids=PROMPTS[1])
    assert Heads.gap(model, PROMPTS[1], result) < 0.05


# Pooling

PAD = 5


@pytest.mark.parametrize("pad", [None, PAD])
@pytest.mark.parametrize(
    "prompt",
    [
        [9, 8, 7],
        [9, 8, PAD],
        [9, PAD, PAD, PAD],
        [PAD, 9, 8],
        [9, PAD, 8, PAD, PAD],
        [PAD, PAD, PAD],
        [PAD],
        [9],
        [PAD, 9, *[PAD] * 30],
    ],
    ids=str,
)
def test_a_score_stands_where_transformers_pools(make_engine: Any, prompt: list[int], pad: Any) -> None:
    """Issue 4, item 2: at the rightmost token that is no pad, the first if all are; the last without a pad
    id. What lies behind isn't computed, and counts as given."""
    model = Heads.model("score", pad_token_id=pad)
    engine = make_engine(model, chunked_prefill_size=2, page_size=2)
    for _ in range(2):
        assert Heads.gap(model, prompt, engine.encode(input_ids=prompt)) < EXACT
    trailing = len(prompt) - len([*"".join("p" if t == PAD else "x" for t in prompt).rstrip("p")])
    computed = len(prompt) if pad is None else max(1, len(prompt) - trailing)
    assert Tiny.state(engine)["prefill_tokens"] <= 2 * computed


def test_the_pad_id_is_that_of_the_config_now(make_engine: Any) -> None:
    """As in transformers, which reads it at every forward: trainers set it after loading."""
    model = Heads.model("score")
    engine = make_engine(model)
    prompt = [9, 8, PAD]
    before = engine.encode(input_ids=prompt)["score"]
    model.config.pad_token_id = PAD
    assert Heads.gap(model, prompt, engine.encode(input_ids=prompt)) < EXACT
    assert engine.encode(input_ids=prompt)["score"] != before


def test_values_have_no_pads(make_engine: Any) -> None:
    """A value model scores every token that was given, pads too, as transformers does."""
    model = Heads.model("values", pad_token_id=PAD)
    Heads.check(model, make_engine(model), [[9, 8, PAD, PAD], [PAD]])


# Chunks, cache, shared prompts


@pytest.mark.parametrize("chunk", [1, 2, 5, 16, 41])
@pytest.mark.parametrize("reading", ["score", "values"])
def test_chunks_of_every_size(make_engine: Any, reading: str, chunk: int) -> None:
    """F9's kind: the prompt's states come in pieces of any size, cut anywhere, and miss nothing."""
    model = Heads.model(reading, "mistral", sliding_window=8, num_labels=2, pad_token_id=PAD)
    engine = make_engine(model, chunked_prefill_size=chunk, page_size=4)
    Heads.check(model, engine, [*PROMPTS, [*PROMPTS[2], PAD, PAD]])
    Tiny.all_back(engine)


def test_a_cached_prefix_is_used_for_scores_and_never_for_values(make_engine: Any) -> None:
    """Contract 3: a score needs its own position, whatever is cached; values need every token's state."""
    stem = Tiny.prompt(24)
    prompts = [[*stem, 1, 2, 3], [*stem, 4, 5], stem, [*stem, 1, 2, 3]]
    for reading, cached in (("score", [0, 24, 20, 24]), ("values", [0, 0, 0, 0])):
        model = Heads.model(reading)
        engine = make_engine(model, page_size=4)
        found = []
        for prompt in prompts:
            result = engine.encode(input_ids=prompt)
            assert Heads.gap(model, prompt, result) < EXACT
            found.append(result["meta_info"]["cached_tokens"])
        assert found == cached
        assert (Tiny.state(engine)["pages"]["cached"] == 0) == (reading == "values")
        engine.flush_cache()
        assert engine.encode(input_ids=stem)["meta_info"]["cached_tokens"] == 0


@pytest.mark.parametrize("reading", ["score", "values"])
def test_identical_prompts_are_computed_once(make_engine: Any, reading: str) -> None:
    """F4's kind: prompts of one call that are alike are one computation, whatever its chunks; each has all
    of it."""
    model, prompt = Heads.model(reading), PROMPTS[2]
    engine = make_engine(model, page_size=4, chunked_prefill_size=7)
    results = Heads.check(model, engine, [prompt] * 4)
    assert Tiny.state(engine)["prefill_tokens"] == len(prompt)
    assert [result["meta_info"]["cached_tokens"] for result in results] == [0, 40, 40, 40]
    assert all(result["score"] == results[0]["score"] for result in results)
    results[1].clear()
    Tiny.all_back(engine)


def test_many_prompts_in_a_small_cache(make_engine: Any) -> None:
    """C3's kind: ten times what the cache holds, queued at once, in order."""
    model = Heads.model("values")
    engine = make_engine(model, page_size=4, max_total_tokens=64, chunked_prefill_size=16)
    Heads.check(model, engine, [Tiny.prompt(20 + at, seed=at) for at in range(24)])
    Tiny.all_back(engine)


# Ends before the end

POISON = 7


@pytest.mark.parametrize("reading", ["score", "values"])
@pytest.mark.parametrize("chunk", [8, 2048])
def test_a_score_that_is_no_number_ends_alone(make_engine: Any, reading: str, chunk: int) -> None:
    """F7: it ends as abort, saying so, with nothing read; its neighbours are exact, its KV is not kept."""
    model = Heads.model(reading)
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = torch.nan
    clean = [token for token in range(20, 57) if token != POISON]
    bad = [*clean[:20], POISON, *clean[20:]]
    engine = make_engine(model, page_size=4, chunked_prefill_size=chunk)
    for order in (1, -1, 1):
        prompts = [clean, bad, bad, clean[5:]]
        first, *broken, last = engine.encode(input_ids=prompts[::order])[::order]
        for result in broken:
            reason = result["meta_info"]["finish_reason"]
            assert reason == {"type": "abort", "message": "the model's scores are not finite"}
            assert result["score"] == ([] if reading == "values" else None)
        assert Heads.gap(model, clean, first) < EXACT
        assert Heads.gap(model, clean[5:], last) < EXACT
    state = Tiny.state(engine)["pages"]
    assert state["free"] + state["idle"] == state["total"]


@pytest.mark.parametrize("labels", [1, 2])
def test_an_abort_in_the_midst(make_engine: Any, step_gate: Any, labels: int) -> None:
    """Contract 4: an aborted value request has the values of the tokens computed by then, an aborted score
    none, and every field."""
    for reading in ("values", "score"):
        model = Heads.model(reading, num_labels=labels)
        engine = make_engine(model, chunked_prefill_size=8, page_size=4)
        with step_gate(engine) as gate:
            stream = engine.client.generate_request(EmbeddingReqInput(input_ids=PROMPTS[2], rid="r"))
            gate.step(2)
            gate.wait()
            engine.abort("r")
            result = engine.llm.run(stream.result(20))
        meta = result["meta_info"]
        assert meta["finish_reason"]["type"] == "abort" and meta["completion_tokens"] == 0
        if reading == "values":
            expected = Heads.expected(model, PROMPTS[2])[:16]
            assert (torch.tensor(result["score"]) - expected).abs().max() < EXACT
        else:
            assert result["score"] is None
        Tiny.all_back(engine)


def test_timeouts_and_lengths(make_engine: Any, step_gate: Any) -> None:
    """Contract 7, F11: a timeout aborts; too long for the context or the cache is refused, exactly as long is
    scored."""
    model = Heads.model("values", max_position_embeddings=64)
    engine = make_engine(model, max_total_tokens=128)
    with step_gate(engine), pytest.raises(EngineTimeoutError):
        engine.encode(input_ids=PROMPTS[0], timeout=0.05)
    Heads.check(model, engine, [Tiny.prompt(63), Tiny.prompt(64)])
    with pytest.raises(RequestError, match="65 tokens leaves no room"):
        engine.encode(input_ids=[Tiny.prompt(3), Tiny.prompt(65)])
    small = make_engine(model, max_total_tokens=32)
    Heads.check(model, small, [Tiny.prompt(32)])
    with pytest.raises(RequestError, match="KV capacity of 32"):
        small.encode(input_ids=Tiny.prompt(33))
    Tiny.all_back(engine)
