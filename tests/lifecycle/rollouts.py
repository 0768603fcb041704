"""What tests of the life cycle ask of an engine, and references for requests that outlive their weights."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from tests.step_gate import StepGate
from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.generate_stream import GenerateStream
from tokenspeed_rl.requests import GenerateReqInput

WAIT = 20.0
EXACT = 1e-4
Models = Mapping[str, PreTrainedModel]


def owner(make_engine: Callable[..., Engine], model: PreTrainedModel, **options: Any) -> Engine:
    """An engine whose own weights are `model`'s, called "W0"."""
    engine = make_engine(model.config, **{"page_size": 4, **options})
    push(engine, model, "W0")
    return engine


def push(engine: Engine, model: PreTrainedModel, label: str | None = None, **fields: Any) -> Any:
    """Make the engine's weights those of `model`."""
    return engine.update_weights_from_tensor(dict(model.named_parameters()), weight_version=label, **fields)


def ask(engine: Engine, ids: Sequence[Any], fields: Mapping[str, Any] | None = None, **params: Any) -> Any:
    """Submit a request now, as `AsyncLLM.generate_request` does; `take` gives its result."""
    return engine.client.submit(
        GenerateReqInput(
            input_ids=list(ids),
            sampling_params={"max_new_tokens": 6, **params},
            return_logprob=True,
            **(fields or {}),
        )
    )


def take(engine: Engine, *streams: GenerateStream) -> Any:
    """The results of requests: of one its own, else a list."""
    results = [engine.llm.run(stream.result(WAIT)) for stream in streams]
    return results[0] if len(results) == 1 else results


class Posts:
    """Within, `wait` returns as things come into the loop's inbox, or a noted call ends."""

    def __init__(self, engine: Engine) -> None:
        self._loop: Any = engine.client._core.loop
        self._post = self._loop._post
        self._posted = threading.Semaphore(0)

    def __enter__(self) -> Posts:
        self._loop._post = lambda *command: (self._post(*command), self.note())
        return self

    def __exit__(self, *_: object) -> None:
        self._loop._post = self._post

    def note(self, *_: object) -> None:
        """One more."""
        self._posted.release()

    def wait(self) -> None:
        """Until there is one more."""
        assert self._posted.acquire(timeout=WAIT), "nothing came"


def begin(engine: Engine, pool: ThreadPoolExecutor, call: Callable[..., Any], *args: Any) -> Future[Any]:
    """`call` on a thread of its own; it is in the loop's inbox, or over, on return."""
    with Posts(engine) as posts:
        future = pool.submit(call, *args)
        future.add_done_callback(posts.note)
        posts.wait()
    return future


def begin_update(
    engine: Engine, pool: ThreadPoolExecutor, gate: StepGate, call: Callable[..., Any], *args: Any
) -> Future[Any]:
    """`call`, an update, on a thread of its own; its first write waits for the step at the gate to end. One
    step was let through."""
    with Posts(engine) as posts:
        future = pool.submit(call, *args)
        future.add_done_callback(posts.note)
        posts.wait()
        gate.step()
        posts.wait()
    return future


def settled(engine: Engine) -> None:
    """The loop has taken everything that was in its inbox, and gone on to a step if it may."""
    for _ in range(2):
        engine.flush_cache()


def span_gap(
    models: Models, prompt: Sequence[int], result: dict[str, Any], temperature: float = 1.0
) -> float:
    """Largest difference of a token's logprob from a full recompute by the model of its version span."""
    meta, ids = result["meta_info"], [*prompt, *result["output_ids"]]
    spans = meta["weight_versions"]
    assert spans[0]["start"] == 0 and spans[-1]["end"] == meta["completion_tokens"] == len(ids) - len(prompt)
    assert all(before["end"] == after["start"] for before, after in pairwise(spans))
    assert meta["weight_version"] == spans[-1]["version"]
    triples, gap = meta["output_token_logprobs"], 0.0
    assert [token for _, token, _ in triples] == result["output_ids"]
    for span in spans:
        expected = Tiny.ref_logprobs(models[span["version"]], ids, temperature)[len(prompt) - 1 :]
        for at in range(span["start"], span["end"]):
            gap = max(gap, abs(triples[at][0] - expected[at]))
    return gap


@torch.no_grad()
def frozen_logprobs(ids: Sequence[int], *parts: tuple[PreTrainedModel, int]) -> list[float]:
    """logprob of ids[1:], where each of `parts`, (model, end), computes the tokens from the part before it up
    to `end` over the keys and values that the models before it left."""
    cache, start, rows = DynamicCache(), 0, []
    for model, end in parts:
        chunk = torch.tensor([list(ids[start:end])])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the argument's name is about to change
            rows.append(model(input_ids=chunk, past_key_values=cache, use_cache=True).logits[0].double())
        start = end
    logprobs = torch.cat(rows).log_softmax(-1)
    return [logprobs[at, token].item() for at, token in enumerate(ids[1:])]


def frozen_gap(prompt: Sequence[int], result: dict[str, Any], *parts: tuple[PreTrainedModel, int]) -> float:
    """As `span_gap`, for a request whose KV was computed in `parts`; the last one's end is the sample's."""
    ids = [*prompt, *result["output_ids"]]
    expected = frozen_logprobs(ids, *parts[:-1], (parts[-1][0], len(ids)))[len(prompt) - 1 :]
    triples = result["meta_info"]["output_token_logprobs"]
    return max(abs(value - ref) for (value, _, _), ref in zip(triples, expected, strict=True))


def labels(result: dict[str, Any]) -> list[tuple[str, int, int]]:
    """The version spans of a result."""
    return [(span["version"], span["start"], span["end"]) for span in result["meta_info"]["weight_versions"]]


def reason(result: dict[str, Any]) -> str:
    """What ended a sample."""
    kind: str = result["meta_info"]["finish_reason"]["type"]
    return kind


class Forwards:
    """Counts an engine's forwards, and the tokens in them."""

    def __init__(self, engine: Engine) -> None:
        loop: Any = engine.client._core.loop
        run = loop.runner.run
        self.count = self.tokens = 0

        def count(plan: Any) -> Any:
            self.count += 1
            self.tokens += plan.num_tokens
            return run(plan)

        loop.runner.run = count


class StuckUpdate:
    """An update whose iterator stands between its second and its third pair until told."""

    def __init__(self, engine: Engine, model: Any, pool: Any) -> None:
        self.standing, self.go_on = threading.Event(), threading.Event()
        self._pairs = list(model.named_parameters())
        self.reply = pool.submit(engine.update_weights_from_tensor, self.pairs(), weight_version="W1")

    def pairs(self) -> Iterator[Any]:
        """Those of the model."""
        for number, pair in enumerate(self._pairs):
            if number == 2:
                self.standing.set()
                assert self.go_on.wait(WAIT)
            yield pair


def pause_at(engine: Engine, gate: StepGate, pool: Any, mode: str, steps: int) -> None:
    """Pause between two steps, `steps` from now; the gate is closed and nothing stands at it."""
    gate.step(steps - 1)
    gate.wait()
    pausing = begin(engine, pool, engine.pause, mode)
    gate.step()
    assert pausing.result(WAIT) is True


def so_far(*streams: Any) -> list[Any]:
    """Ids, logprobs and spans of every sample, copied."""
    return [
        (
            r.output_ids,
            {k: list(v) for k, v in r.logprobs.items()},
            [(s.version, s.start, s.end) for s in r.spans],
        )
        for stream in streams
        for r in stream._requests
    ]
