"""The experts by which each token was computed, against a recompute by transformers' router logits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.step_gate import StepGate
from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.errors import RequestError

PROMPTS = [Tiny.prompt(length, seed=length) for length in (1, 18, 40)]
WAIT = 20.0


@pytest.fixture(scope="module")
def moe() -> PreTrainedModel:
    return Tiny.model("moe")


def ask(engine: Engine, prompts: Any, **fields: Any) -> Any:
    params = {"max_new_tokens": 8, **fields.pop("params", {})}
    return engine.generate(
        input_ids=prompts,
        sampling_params=params,
        return_logprob=True,
        return_routed_experts=True,
        **fields,
    )


def check(model: PreTrainedModel, prompt: list[int], result: dict[str, Any]) -> None:
    """Every row is what `model` chooses for the whole sequence, the last token aside."""
    check_versions({}, prompt, result, model)


def check_versions(
    models: Mapping[str, PreTrainedModel],
    prompt: list[int],
    result: dict[str, Any],
    otherwise: PreTrainedModel | None = None,
) -> None:
    """Rows and logprobs that led to a token are those of the weights that drew it."""
    meta, ids = result["meta_info"], [*prompt, *result["output_ids"]]
    rows, values = meta["routed_experts"], meta["output_token_logprobs"]
    assert len(rows) == meta["prompt_tokens"] + meta["completion_tokens"] - 1 == len(ids) - 1
    for span in meta["weight_versions"]:
        model = models.get(span["version"], otherwise)
        assert model is not None, span
        experts, logprobs = Tiny.experts(model, ids[:-1]), Tiny.ref_logprobs(model, ids)
        first = len(prompt) + span["start"] - 1 if span["start"] else 0
        for at in range(first, len(prompt) + span["end"] - 1):
            assert rows[at] == experts[at], f"row {at} of {span}"
        for at in range(span["start"], span["end"]):
            assert abs(values[at][0] - logprobs[len(prompt) + at - 1]) < 1e-4


@pytest.mark.parametrize("family", ["moe", "mixtral"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill_size": 5, "page_size": 4},
        {"enable_prefix_caching": False, "max_running_requests": 2},
        {"page_size": 1, "chunked_prefill_size": 16, "max_total_tokens": 96},
    ],
)
def test_every_token(make_engine: Callable[..., Engine], family: str, options: dict[str, Any]) -> None:
    """Issue 4, item 3: one row per token but the last, [layers, k], likeliest first, however prompts were
    chunked, cached, shared or retracted, for each of n samples."""
    model = Tiny.model(family)
    engine = make_engine(model, **options)
    for _ in range(2):  # the second time the prompts are in the cache
        prompts = [*PROMPTS, *PROMPTS[1:]]
        results = ask(engine, prompts, params={"n": 2, "max_new_tokens": 14})
        for at, result in enumerate(results):
            check(model, prompts[at // 2], result)
    if "max_total_tokens" in options:
        assert Tiny.state(engine)["num_retractions"] > 3
    json.dumps(results[0]["meta_info"]["routed_experts"])  # plain ints
    Tiny.all_back(engine)


def test_layers_without_experts(make_engine: Callable[..., Engine]) -> None:
    """Issue 4, item 3: a dense layer's place in a row holds -1, so that places are the decoder's layers."""
    model = Tiny.model("moe", mlp_only_layers=[1], num_hidden_layers=3)
    result = ask(make_engine(model), PROMPTS[1])
    expected = Tiny.experts(model, [*PROMPTS[1], *result["output_ids"]][:-1])
    rows = result["meta_info"]["routed_experts"]
    assert rows == [[first, [-1, -1, -1], last] for first, last in expected]


def test_a_prompt_in_the_cache_is_computed_for_whoever_asks(
    make_engine: Callable[..., Engine], moe: PreTrainedModel
) -> None:
    """Issue 4, item 3: cached pages don't know their routes, so who asks computes them; who doesn't gets
    the pages."""
    engine, prompt = make_engine(moe, page_size=4), PROMPTS[2]
    plain = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4}}
    engine.generate(**plain)
    asked = ask(engine, prompt)
    check(moe, prompt, asked)
    again = engine.generate(**plain)
    assert asked["meta_info"]["cached_tokens"] == 0 and again["meta_info"]["cached_tokens"] == 36
    assert "routed_experts" not in again["meta_info"]


def test_turns_of_a_session(make_engine: Callable[..., Engine], moe: PreTrainedModel) -> None:
    """Contract 7: a turn's rows are of the whole sequence so far, though its KV may be there."""
    engine, before = make_engine(moe, page_size=4), list[int]()
    engine.open_session(100, "s")
    for turn in ([5, 6, 7, 8, 9], [1, 2], [3]):
        result = ask(engine, turn, params={"max_new_tokens": 6}, session_params={"id": "s"})
        assert result["meta_info"]["prompt_ids"] == [*before, *turn]
        check(moe, [*before, *turn], result)
        before += [*turn, *result["output_ids"]]


@pytest.mark.parametrize("first", [True, False])
def test_equal_prompts_of_which_one_asks(
    make_engine: Callable[..., Engine], moe: PreTrainedModel, first: bool
) -> None:
    """F4: samples that ask share their prompt's rows; a twin that doesn't ask leads none of them."""
    engine, prompt = make_engine(moe, chunked_prefill_size=8), PROMPTS[2]
    asking = engine.async_generate(
        input_ids=prompt,
        sampling_params={"n": 3, "max_new_tokens": 5},
        return_logprob=True,
        return_routed_experts=True,
    )
    plain = engine.async_generate(input_ids=prompt, sampling_params={"max_new_tokens": 5})

    async def both() -> list[Any]:
        return await asyncio.gather(*((asking, plain) if first else (plain, asking)))

    results = engine.llm.run(both())
    asked, other = results if first else results[::-1]
    for result in asked:
        check(moe, prompt, result)
    assert "routed_experts" not in other["meta_info"]
    assert Tiny.state(engine)["prefill_tokens"] <= 2 * len(prompt)


def test_scores_of_a_prompt(make_engine: Callable[..., Engine], moe: PreTrainedModel) -> None:
    """F11: with `max_new_tokens=0` the rows are the prompt's, its last token aside."""
    engine = make_engine(moe, chunked_prefill_size=7)
    for result in ask(engine, PROMPTS[2], params={"max_new_tokens": 0, "n": 2}):
        assert result["meta_info"]["routed_experts"] == Tiny.experts(moe, PROMPTS[2][:-1])


@pytest.mark.parametrize("interval", [1, 3])
def test_streams(make_engine: Callable[..., Engine], moe: PreTrainedModel, interval: int) -> None:
    """Contract 4: rows are deltas that concatenate to the final result."""
    engine = make_engine(moe, chunked_prefill_size=8)
    whole: dict[tuple[int, int], dict[str, Any]] = {}
    params = {"n": 2, "max_new_tokens": 8, "stream_interval": interval}
    for message in ask(engine, PROMPTS, params=params, stream=True):
        key = message["prompt_index"], message["index"]
        meta, before = message["meta_info"], whole.get(key)
        if before is not None:
            for name in ("routed_experts", "output_token_logprobs"):
                meta[name] = before["meta_info"][name] + meta[name]
            message["output_ids"] = before["output_ids"] + message["output_ids"]
        assert len(meta["routed_experts"]) == meta["prompt_tokens"] + meta["completion_tokens"] - 1
        whole[key] = message
    assert len(whole) == 6
    for (prompt, _), message in whole.items():
        check(moe, PROMPTS[prompt], message)


@pytest.mark.parametrize("steps", [0, 2, 5, 9])
def test_aborted(make_engine: Callable[..., Engine], moe: PreTrainedModel, steps: int) -> None:
    """C2: an abort gives the rows of what was sampled, and none before the first token."""
    engine, prompt = make_engine(moe, chunked_prefill_size=8), PROMPTS[2]
    with StepGate(engine) as gate, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, engine, prompt, rid="a", params={"max_new_tokens": 30})
        gate.wait()
        gate.step(steps)
        if steps:
            gate.wait()
        engine.abort("a")
        result = waiting.result(WAIT)
        gate.open()
    assert len(result["output_ids"]) == max(0, steps - 4)
    if result["output_ids"]:
        check(moe, prompt, result)
    else:
        assert result["meta_info"]["routed_experts"] == []
    Tiny.all_back(engine)


def test_only_batches_where_someone_asks_pay(
    make_engine: Callable[..., Engine], moe: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 4, item 3: routes are gathered in the steps of requests that ask, and rows known before a
    retraction are not brought again."""
    engine, asked = make_engine(moe), []
    decoder = engine.client._core.source.decoder
    forward = decoder.forward

    def spy(batch: Any, kv: Any, *, routes: Any) -> Any:
        asked.append(routes is not None)
        return forward(batch, kv, routes=routes)

    monkeypatch.setattr(decoder, "forward", spy)
    plain = {"input_ids": PROMPTS[0], "sampling_params": {"max_new_tokens": 3}}
    engine.generate(**plain)
    ask(engine, PROMPTS[1], params={"max_new_tokens": 3})
    engine.generate(**plain)
    assert asked == [False] * 3 + [True] * 3 + [False] * 3


def test_a_model_without_experts(counter: Engine) -> None:
    """Rule 5: there is nothing to return, so it is refused, and nothing is lost."""
    with pytest.raises(RequestError, match="mixtures of experts"):
        counter.generate(input_ids=[1], return_routed_experts=True)
    params = {"temperature": 0, "max_new_tokens": 2}
    assert counter.generate(input_ids=[1], sampling_params=params)["output_ids"] == [2, 3]


class Trained:
    """An engine whose weights, its own or a module's, become others in the midst of requests for routes."""

    def __init__(self, make_engine: Callable[..., Engine], *, shared: bool = False, **options: Any) -> None:
        self.models = {f"W{seed}": Tiny.model("moe", seed=seed) for seed in range(3)}
        self.module = Tiny.model("moe") if shared else None
        source = self.module or self.models["W0"].config
        self.engine = make_engine(source, weight_version="W0", page_size=4, **options)
        self.push("W0")

    def push(self, label: str) -> None:
        """Of a shared module one command, so that it comes before the next step of an engine that runs."""
        named = dict(self.models[label].named_parameters())
        if self.module is None:
            self.engine.update_weights_from_tensor(named, weight_version=label)
        else:
            self.module.load_state_dict(named)
            self.engine.weights_changed(label)

    def check(self, prompts: list[list[int]], results: list[dict[str, Any]], samples: int = 1) -> None:
        for at, result in enumerate(results):
            check_versions(self.models, prompts[at // samples], result)
        Tiny.all_back(self.engine)


def retract_and_push(trained: Trained) -> None:
    with trained.engine.paused("retract"):
        trained.push("W1")


def push_while_it_runs(trained: Trained) -> None:
    trained.push("W1")


def retract_sleep_and_push(trained: Trained) -> None:
    with trained.engine.paused("retract"):
        trained.engine.release_memory_occupation()
        trained.engine.resume_memory_occupation(["weights"])
        trained.push("W1")
        trained.engine.resume_memory_occupation()


@pytest.mark.parametrize("change", [retract_and_push, push_while_it_runs, retract_sleep_and_push])
@pytest.mark.parametrize(
    "options",
    [{}, {"chunked_prefill_size": 7}, {"max_total_tokens": 128, "chunked_prefill_size": 16}],
)
def test_what_was_sampled_before_an_update_keeps_its_routes(
    make_engine: Callable[..., Engine], change: Callable[[Trained], None], options: dict[str, Any]
) -> None:
    """C11: routes and logprobs of tokens sampled before an update stay those of W0, those after are W1's, in
    the same sequence, whatever was retracted and computed again meanwhile."""
    trained = Trained(make_engine, shared=change is push_while_it_runs, **options)
    acted = Tiny.after_step(trained.engine, 12, lambda: change(trained))
    results = ask(trained.engine, PROMPTS, params={"n": 2, "max_new_tokens": 24}, wait=True)
    acted.result(WAIT)
    spans = [[span["version"] for span in r["meta_info"]["weight_versions"]] for r in results]
    assert ["W0", "W1"] in spans, "no request lived through the update"
    trained.check(PROMPTS, results, 2)


def test_two_updates(make_engine: Callable[..., Engine]) -> None:
    """C11, D3: three spans, each with its own weights' routes."""
    trained = Trained(make_engine, shared=True)
    pushes = [Tiny.after_step(trained.engine, 4, lambda: trained.push("W1"))]
    first = Tiny.after_step(trained.engine, 9, lambda: trained.push("W2"))
    results = ask(trained.engine, [PROMPTS[1]], params={"max_new_tokens": 16})
    for push in (*pushes, first):
        push.result(WAIT)
    assert [s["version"] for s in results[0]["meta_info"]["weight_versions"]] == ["W0", "W1", "W2"]
    trained.check([PROMPTS[1]], results)


@pytest.mark.parametrize("n", [1, 3])
def test_what_has_sampled_nothing_starts_over(make_engine: Callable[..., Engine], n: int) -> None:
    """C11: an update in the middle of a prompt: all rows are of the weights that drew the first token."""
    trained = Trained(make_engine, shared=True, chunked_prefill_size=8)
    pushed = Tiny.after_step(trained.engine, 3, lambda: trained.push("W1"))
    results = ask(trained.engine, [PROMPTS[2]], params={"n": n, "max_new_tokens": 5})
    pushed.result(WAIT)
    for result in results:
        assert [span["version"] for span in result["meta_info"]["weight_versions"]] == ["W1"]
    trained.check([PROMPTS[2]], results, n)


def test_frozen_requests_keep_their_rows(make_engine: Callable[..., Engine]) -> None:
    """C11: under `keep` what was sampled before keeps its W0 rows, and every later token has one."""
    trained, prompt = Trained(make_engine), PROMPTS[1]
    engine = trained.engine

    def change() -> None:
        with engine.paused("keep"):
            trained.push("W1")

    changed = Tiny.after_step(engine, 6, change)
    result = ask(engine, prompt, params={"max_new_tokens": 12}, wait=True)
    changed.result(WAIT)
    old, new = result["meta_info"]["weight_versions"]
    assert (old["version"], new["version"], new["end"]) == ("W0", "W1", 12)
    rows = result["meta_info"]["routed_experts"]
    kept = len(prompt) + old["end"] - 1
    expected = Tiny.experts(trained.models["W0"], [*prompt, *result["output_ids"]][:-1])
    assert rows[:kept] == expected[:kept] and len(rows) == len(expected)
    assert torch.tensor(rows).shape == (len(prompt) + 11, 2, 3)


def test_a_stream_across_an_update(make_engine: Callable[..., Engine]) -> None:
    """C11: rows that were handed out are not handed out again."""
    trained, prompt = Trained(make_engine, shared=True), PROMPTS[1]
    pushed = Tiny.after_step(trained.engine, 5, lambda: trained.push("W1"))
    rows, values, ids = [], [], []
    for message in ask(trained.engine, prompt, params={"max_new_tokens": 12}, stream=True):
        rows += message["meta_info"]["routed_experts"]
        values += message["meta_info"]["output_token_logprobs"]
        ids += message["output_ids"]
    pushed.result(WAIT)
    meta = {**message["meta_info"], "routed_experts": rows, "output_token_logprobs": values}
    assert len(meta["weight_versions"]) == 2
    trained.check([prompt], [{"output_ids": ids, "meta_info": meta}])
