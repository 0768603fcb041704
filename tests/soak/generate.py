"""A thread that generates, in every way there is, and checks what it gets."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

from tests.soak.check import Asked, check
from tests.soak.weights import Reference
from tests.soak.worker import Worker
from tests.soak.world import Side, World
from tokenspeed_rl.errors import EngineStateError, EngineTimeoutError
from tokenspeed_rl.requests import GenerateReqInput

WAYS = ("block", "block", "wait", "wait", "stream", "stream", "abandon", "async")
STOP_IDS = tuple(range(0, 256, 16))
SEEDED = 2
"""How many of the prompts are asked with a seed: few, so that each is drawn again and again."""


class Generator(Worker):
    """Requests of every kind, each checked."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._reference = Reference(world.weights)

    def call(self, number: int, rng: random.Random) -> None:
        side = rng.choice((self.world.own, self.world.own, self.world.shared))
        way = rng.choice(WAYS)
        start, top = rng.choice((-1, -1, -1, 0, 3)), rng.choice((0, 0, 3))
        routes = self.world.weights.has_experts and rng.random() < 0.5
        rids = [f"{self.name}.{number}.{i}" for i in range(rng.choice((1, 1, 1, 2, 4)))]
        asked = [self._asked(rid, start, top, routes, rng) for rid in rids]
        samples = rng.choice((1, 1, 1, 2, 3))
        timeout = rng.choice((0.01, 0.3, 3.0, 8.0, 8.0))
        request = _request(asked, samples, rng.choice((0, 0, 1)), stream=way in ("stream", "abandon"))
        self.journal.begin(self.name, f"{side.name} {way} {number}: {len(asked)}x{samples}")
        side.live += [one.rid for one in asked]
        try:
            results = self._make(side, way, request, timeout, rng)
            expected = len(asked) * samples
            assert results is None or len(results) == expected, f"{len(results or ())} of {expected} samples"
            outcome = self._check(side, asked, samples, results) if results else "abandoned"
        except EngineTimeoutError:
            outcome = "timed out"
        except EngineStateError as error:
            assert way == "block" or "was marked" in str(error), f"refused although it waits: {error}"
            outcome = "refused"
        finally:
            for one in asked:
                side.live.remove(one.rid)
                side.frozen.forget(one.rid)
        self.journal.end(self.name, outcome)

    def _asked(self, rid: str, prompt_start: int, top: int, routes: bool, rng: random.Random) -> Asked:
        seeded = rng.random() < 0.4
        return Asked(
            rid=rid,
            prompt=rng.choice(self.world.prompts[:SEEDED] if seeded else self.world.prompts),
            max_new_tokens=rng.choice((0, 1, 4, 12, 24, 40, 60)),
            temperature=1.0 if seeded else rng.choice((0.0, 1.0, 1.0, 0.7)),
            seed=7 if seeded else None,
            stop_ids=rng.choice(((), (), STOP_IDS)),
            prompt_start=prompt_start,
            top=top,
            routes=routes,
        )

    def _make(
        self, side: Side, way: str, request: GenerateReqInput, timeout: float, rng: random.Random
    ) -> list[dict[str, Any]] | None:
        engine = side.engine
        fewest = rng.choice((0, 1, 5))
        if way == "block":
            found = engine.llm.generate(request, timeout, wait=False)
        elif way == "wait":
            found = engine.llm.generate(request, timeout, wait=True)
        elif way == "async":
            found = engine.llm.run(engine.client.generate(request, timeout=timeout))
        else:
            stream = engine.client.submit(request)
            try:
                return self._consume(side, stream, timeout, fewest if way == "abandon" else None)
            finally:
                if rng.random() < 0.5:
                    stream.abandon()  # else it is collected
        return found if isinstance(found, list) else [found]

    def _consume(
        self, side: Side, stream: Any, timeout: float, most: int | None
    ) -> list[dict[str, Any]] | None:
        """Final results put together from deltas; None: after `most` messages the stream is left alone."""
        whole: dict[tuple[int, int], dict[str, Any]] = {}
        taken, end = 0, time.monotonic() + timeout
        while True:
            if most is not None and taken >= most:
                return None
            try:
                message = side.engine.llm.run(stream.asend(None), max(0.0, end - time.monotonic()))
            except StopAsyncIteration:
                break
            taken += 1
            key = message["prompt_index"], message["index"]
            before = whole.setdefault(
                key, {"output_ids": [], "output_token_logprobs": [], "top": [], "routes": []}
            )
            meta = message["meta_info"]
            before["output_ids"] += message["output_ids"]
            before["output_token_logprobs"] += meta["output_token_logprobs"]
            before["top"] += meta.get("output_top_logprobs", [])
            before["routes"] += meta.get("routed_experts", [])
            joined = {
                "output_token_logprobs": before["output_token_logprobs"],
                "output_top_logprobs": before["top"],
                "routed_experts": before["routes"],
            }
            before["last"] = {"output_ids": before["output_ids"], "meta_info": {**meta, **joined}}
        return [whole[key]["last"] for key in sorted(whole)]

    def _check(self, side: Side, asked: list[Asked], samples: int, results: list[dict[str, Any]]) -> str:
        done: Counter[str] = Counter()
        for place, result in enumerate(results):
            one, index = asked[place // samples], result["meta_info"]["index"]
            assert index == place % samples, f"sample {index} at place {place}"
            intervals = side.frozen.take(one.rid, index)
            try:
                found = check(one, result, intervals, side.book, self._reference)
            except AssertionError as error:
                raise AssertionError(f"{side.name}: {error}\n{one}\n{result}\nfrozen {intervals}") from error
            self.world.draws.compare(one, result, frozen=bool(found.frozen))
            done["samples"] += 1
            done["tokens"] += found.exact
            done["frozen tokens"] += found.frozen
            done["samples of several versions"] += found.versions > 1
            done["ended by " + result["meta_info"]["finish_reason"]["type"]] += 1
        for what, number in done.items():
            self.journal.count(what, number)
        return "checked"


def _request(asked: list[Asked], samples: int, priority: int, *, stream: bool) -> GenerateReqInput:
    return GenerateReqInput(
        input_ids=[one.prompt for one in asked],
        rid=[one.rid for one in asked],
        sampling_params=[
            {
                "n": samples,
                "max_new_tokens": one.max_new_tokens,
                "temperature": one.temperature,
                "seed": one.seed,
                "stop_token_ids": list(one.stop_ids) or None,
            }
            for one in asked
        ],
        return_logprob=True,
        logprob_start_len=asked[0].prompt_start,
        top_logprobs_num=asked[0].top,
        return_routed_experts=asked[0].routes,
        priority=priority,
        stream=stream,
    )
