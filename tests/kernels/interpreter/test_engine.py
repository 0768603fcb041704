"""An engine with the Triton backend, its kernels interpreted, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tokenspeed_rl import Engine
from tokenspeed_rl.core import engine_core, residents
from tokenspeed_rl.core.capture import CallAgain
from tokenspeed_rl.core.decode_graphs import DecodeGraphs
from tokenspeed_rl.core.kv_sizing import KVSize

Make = Callable[..., Engine]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "moe", "mixtral")
BOUND = 1e-4


@pytest.fixture
def triton_engine(make_engine: Make) -> Make:
    """`make_engine` with the backend under test, and few rows."""

    def make(model: Any, **options: Any) -> Engine:
        few = {"attention_backend": "triton", "max_running_requests": 8, "max_model_len": 256}
        return make_engine(model, **{**few, **options})

    return make


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests each replayed step decoded."""
    seen: list[int] = []
    run = DecodeGraphs.run

    def counted(self: DecodeGraphs, requests: Any) -> Any:
        seen.append(len(requests))
        return run(self, requests)

    monkeypatch.setattr(DecodeGraphs, "run", counted)
    return seen


def check(
    tiny: Any, model: Any, prompts: list[list[int]], results: list[dict[str, Any]], heat: float
) -> None:
    for prompt, result in zip(prompts, results, strict=True):
        assert tiny.gap(model, prompt, result, heat) < BOUND
        if heat == 0:
            logits = tiny.logits(model, [*prompt, *result["output_ids"]])[len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == result["output_ids"]


@pytest.mark.parametrize(("family", "graphs"), [*((family, True) for family in FAMILIES), ("llama", False)])
def test_every_family(tiny: Any, triton_engine: Make, replays: list[int], family: str, graphs: bool) -> None:
    """F12: greedy ids and sampled logprobs are those of a full recompute, whether decode steps are replayed
    or launched one by one; a model with experts is never captured."""
    experts = family in ("moe", "mixtral")
    model = tiny.model(family, vocab_size=96, num_hidden_layers=2 if family in ("llama", "qwen2") else 1)
    engine = triton_engine(model, enable_cuda_graph=graphs)
    prompts = [tiny.prompt(length, seed=length, vocab=96) for length in (2, 17)]
    for heat, n in ((0.0, 1), (1.0, 2)):
        params = {"temperature": heat, "n": n, "max_new_tokens": 3 if experts else 5}
        results = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
        check(tiny, model, [prompt for prompt in prompts for _ in range(n)], results, heat)
    assert bool(replays) == (graphs and not experts)


def test_draws_are_the_torch_backends(tiny: Any, triton_engine: Make, make_engine: Make) -> None:
    """The same seeds draw the same tokens on both backends, also through top-k, top-p and min-p."""
    model = tiny.model(num_hidden_layers=1)
    prompts = [tiny.prompt(length, seed=length) for length in (3, 9, 20)]
    params = [
        {"seed": 1, "max_new_tokens": 6, "top_k": 9},
        {"seed": 2, "max_new_tokens": 6, "top_p": 0.8, "temperature": 1.4},
        {"seed": 3, "max_new_tokens": 6, "min_p": 0.05, "temperature": 0.7},
    ]
    kinds = ["raw", "sampling", "processed"]
    asked = {"input_ids": prompts, "sampling_params": params, "return_logprob": True, "logprob_kinds": kinds}
    ours = triton_engine(model).generate(**asked)
    torchs = make_engine(model, attention_backend="torch").generate(**asked)
    for one, other in zip(ours, torchs, strict=True):
        assert one["output_ids"] == other["output_ids"]
        for kind in ("", "_raw", "_processed"):
            found, wanted = (
                [value for value, _, _ in o["meta_info"][f"output_token_logprobs{kind}"]]
                for o in (one, other)
            )
            assert found == pytest.approx(wanted, abs=BOUND)


@pytest.mark.parametrize("caching", [True, False])
def test_samples_that_share_a_long_prompt(
    tiny: Any, triton_engine: Make, replays: list[int], caching: bool
) -> None:
    """F4: a prompt of more than a split is read together by its samples, with equal results."""
    model = tiny.model("qwen2", num_hidden_layers=1, max_position_embeddings=512)
    engine = triton_engine(model, max_model_len=512, enable_prefix_caching=caching, chunked_prefill_size=100)
    prompt = tiny.prompt(300, seed=1)
    params = {"n": 5, "max_new_tokens": 2}
    results = engine.generate(input_ids=prompt, sampling_params=params, return_logprob=True)
    check(tiny, model, [prompt] * 5, results, 1.0)
    assert max(replays) == 5
    graphs = engine.client._core.loop.runner._graphs
    assert graphs._rows.leads.device.max() == 5 and graphs._rows.prefix_lens.device.max() == 288


def test_retraction(tiny: Any, triton_engine: Make, replays: list[int]) -> None:
    """C3: requests that lose their pages and come back, to other rows and pages, lose nothing."""
    model = tiny.model(num_hidden_layers=1)
    engine = triton_engine(model, max_total_tokens=40, page_size=4)
    prompts = [tiny.prompt(5, seed=seed) for seed in range(3)]
    results = engine.generate(
        input_ids=prompts, sampling_params={"max_new_tokens": 12, "temperature": 0}, return_logprob=True
    )
    check(tiny, model, prompts, results, 0.0)
    assert tiny.state(engine)["num_retractions"] > 0 and len(replays) > 10


def test_sleep_and_updates_between_replays(tiny: Any, triton_engine: Make, replays: list[int]) -> None:
    """A11: captured steps serve the weights and pages of now: after an optimizer's step, a sleep of each
    tag, and another module's weights."""
    model = tiny.model(num_hidden_layers=1, vocab_size=64)
    engine = triton_engine(model)
    prompts, params = [tiny.prompt(length, vocab=64) for length in (4, 9)], {"max_new_tokens": 3}

    def generate() -> None:
        before = len(replays)
        results = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
        check(tiny, model, prompts, results, 1.0)
        assert len(replays) > before

    generate()
    held = engine.memory_report()["cuda_graph"]["mapped"]
    assert held > 0
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
        model.model.layers[0].mlp.down_proj.weight.mul_(2)
    engine.weights_changed()
    generate()
    for tags in ("kv_cache", "weights", "cuda_graph", None):
        engine.release_memory_occupation(tags)
        if tags == "cuda_graph":
            assert engine.memory_report()["cuda_graph"]["mapped"] == 0
        engine.resume_memory_occupation(tags)
        generate()
    model = tiny.model(seed=5, num_hidden_layers=1, vocab_size=64)
    engine.share_weights(model)
    generate()
    assert engine.memory_report()["cuda_graph"]["mapped"] == held


def test_steps_captured_while_requests_decode(tiny: Any, triton_engine: Make) -> None:
    """A11: a step is run once to be captured, also while requests decode: it feeds none a token."""
    model = tiny.model(num_hidden_layers=1, vocab_size=96)
    engine = triton_engine(model)
    prompts = [tiny.prompt(length, seed=length, vocab=96) for length in (5, 9, 7)]
    params = [{"temperature": 0, "max_new_tokens": number} for number in (8, 8, 3)]
    results = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
    check(tiny, model, prompts, results, 0.0)


def test_more_rows_than_a_step_has(
    tiny: Any, triton_engine: Make, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C4: steps of more rows than one program plans for are not captured, and compute what they should."""
    monkeypatch.setattr(engine_core, "MOST_ROWS", 2)
    model = tiny.model(num_hidden_layers=1, vocab_size=64)
    engine = triton_engine(model)
    prompts = [tiny.prompt(length, vocab=64) for length in (4, 9, 6)]
    params = [{"temperature": 0, "max_new_tokens": number} for number in (6, 6, 3)]
    results = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
    check(tiny, model, prompts, results, 0.0)
    assert replays and max(replays) == 2


def test_another_number_of_pages(
    tiny: Any, triton_engine: Make, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A11: after a wake that maps more pages than a step was captured with, it writes to the new ones too."""
    sizes = iter((KVSize(3, 48), KVSize(40, 640)))
    monkeypatch.setattr(residents, "kv_size", lambda *_, **__: next(sizes))
    model = tiny.model(num_hidden_layers=1, vocab_size=64)
    engine = triton_engine(model)
    prompts = [tiny.prompt(length, vocab=64) for length in (4, 9)]
    results = engine.generate(input_ids=prompts, sampling_params={"max_new_tokens": 4}, return_logprob=True)
    check(tiny, model, prompts, results, 1.0)
    captured = dict(engine.client._core.loop.runner._graphs._steps)
    engine.release_memory_occupation("kv_cache")
    engine.resume_memory_occupation("kv_cache")
    prompts = [tiny.prompt(20, seed=seed, vocab=64) for seed in range(2)]
    results = engine.generate(input_ids=prompts, sampling_params={"max_new_tokens": 6}, return_logprob=True)
    check(tiny, model, prompts, results, 1.0)
    assert engine.client._core.loop.runner._graphs._steps == captured, "captured anew, for nothing"


def test_own_weights_updated_in_place(tiny: Any, triton_engine: Make, tmp_path: Any) -> None:
    """A11, D1: a captured step computes with the weights that an update wrote."""
    first, second = (tiny.model(seed=seed, num_hidden_layers=1) for seed in (1, 2))
    first.save_pretrained(tmp_path)
    engine = triton_engine(tmp_path)
    prompts, params = [tiny.prompt(7), tiny.prompt(3)], {"max_new_tokens": 3}
    for model in (first, second):
        if model is second:
            engine.update_weights_from_tensor(dict(model.named_parameters()))
        results = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
        check(tiny, model, prompts, results, 1.0)


def test_extras_are_computed_all_the_same(tiny: Any, triton_engine: Make, replays: list[int]) -> None:
    """A request with a penalty goes a longer way, and so do those beside it."""
    model = tiny.model(num_hidden_layers=1)
    engine = triton_engine(model)
    params = [
        {"max_new_tokens": 4, "temperature": 0, "repetition_penalty": 1.3},
        {"max_new_tokens": 4, "temperature": 0},
    ]
    prompts = [tiny.prompt(5), tiny.prompt(8)]
    results = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
    assert not replays
    check(tiny, model, prompts[1:], results[1:], 0.0)
    assert tiny.gap(model, prompts[0], results[0], 0.0) < BOUND


def test_not_finite_logits_end_their_request_alone(
    tiny: Any, triton_engine: Make, replays: list[int]
) -> None:
    """F7: a request whose logits are not finite ends with a reason; its row serves the next one."""
    model = tiny.successor(num_hidden_layers=1)
    with torch.no_grad():
        model.model.embed_tokens.weight[99] = torch.nan
    engine = triton_engine(model)
    params = {"max_new_tokens": 4, "temperature": 0}
    broken, fine = engine.generate(input_ids=[[97], [10]], sampling_params=params)
    assert broken["output_ids"] == [98, 99]
    assert broken["meta_info"]["finish_reason"]["type"] == "abort"
    assert fine["output_ids"] == list(range(11, 15))
    again = engine.generate(input_ids=[[20], [30]], sampling_params=params)
    assert [result["output_ids"][0] for result in again] == [21, 31] and replays


def test_what_cant_be_captured_is_launched(
    tiny: Any, triton_engine: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that refuses captures costs speed, not a token; the log says so, until no more is tried."""

    def refuse(self: CallAgain, work: Callable[[], None]) -> Any:
        work()  # it was run before it failed
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(CallAgain, "__call__", refuse)
    model = tiny.model(num_hidden_layers=1, vocab_size=64)
    engine = triton_engine(model)
    prompts, params = [tiny.prompt(length, vocab=64) for length in (4, 9)], {"max_new_tokens": 6}
    results = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
    check(tiny, model, prompts, results, 1.0)
    lines = [record for record in caplog.records if record.exc_info and "captured" in record.getMessage()]
    assert len(lines) == 3 and all("not permitted" in str(line.exc_info[1]) for line in lines)
    assert engine.memory_report()["cuda_graph"]["mapped"] == 0


def test_scratch_is_made_for_what_is_asked(tiny: Any, triton_engine: Make, replays: list[int]) -> None:
    """A model of long contexts takes scratch for the longest that a request may come to, not for its own
    limit; a longer one has the steps captured anew, with more."""
    model = tiny.successor(num_hidden_layers=1, max_position_embeddings=8192)
    engine = triton_engine(model, max_model_len=8192, max_total_tokens=16384)
    held = []
    for tokens in (8, 1500, 8):
        params = {"max_new_tokens": tokens, "temperature": 0, "stop_token_ids": [14]}
        results = engine.generate(input_ids=[[10], [11]], sampling_params=params)
        assert [result["output_ids"] for result in results] == [[11, 12, 13, 14], [12, 13, 14]]
        held.append(engine.memory_report()["cuda_graph"]["mapped"])
    assert replays and held[0] < held[1] == held[2]
