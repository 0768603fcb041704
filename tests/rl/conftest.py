"""A scripted engine client that keeps the contract's promises about results, rids and aborts."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import pytest

from tokenspeed_rl.requests import GenerateReqInput

EOS = 5


class FakeClient:
    """Answers prompt [.., k] with the sample `[k, index, EOS]`; keeps requests and what is live.

    `script(prompt_ids, index)` overrides fields of a result's meta_info, or "output_ids". `gate`, when set,
    holds every answer back; `failure`, when set, is raised instead of one.
    """

    def __init__(self) -> None:
        self.tokenizer: Any = None
        self.requests: list[GenerateReqInput] = []
        self.live: set[str] = set()
        self.aborted: list[str] = []
        self.closed = 0
        self.script: Callable[[tuple[int, ...], int], dict[str, Any]] = lambda ids, index: {}
        self.gate: asyncio.Event | None = None
        self.failure: Exception | None = None

    async def generate_request(self, obj: GenerateReqInput) -> AsyncGenerator[Any, None]:
        self.requests.append(obj)
        try:
            singles = obj.split(vocab_size=1000, has_tokenizer=self.tokenizer is not None)
            self.live |= {single.rid for single in singles}
            await asyncio.sleep(0)
            if self.gate is not None:
                await self.gate.wait()
            if self.failure is not None:
                raise self.failure
            results = [self._result(one, index) for one in singles for index in range(one.sampling_params.n)]
            self.live -= {single.rid for single in singles}
            yield results if obj.is_batch or len(results) > 1 else results[0]
        finally:
            self.closed += 1

    def abort_request(self, rid: str) -> None:
        self.aborted.append(rid)
        self.live.discard(rid)

    def _result(self, request: GenerateReqInput, index: int) -> dict[str, Any]:
        given = dict(self.script(request.input_ids, index))
        ids = given.pop("output_ids", [request.input_ids[-1], index, EOS])
        suffixes = {"sampling": "", "raw": "_raw", "processed": "_processed"}
        shift = {"sampling": 0.0, "raw": 0.25, "processed": 0.5}
        logprobs = {
            f"output_token_logprobs{suffixes[kind]}": [
                (-1.0 - i - shift[kind], t, None) for i, t in enumerate(ids)
            ]
            for kind in request.logprob_kinds
        }
        meta = {
            "id": request.rid,
            "index": index,
            "finish_reason": {"type": "stop", "matched": EOS},
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": "default",
            "weight_versions": [{"version": "default", "start": 0, "end": len(ids)}],
            "e2e_latency": 0.01,
            **(logprobs if request.return_logprob else {}),
        }
        return {"text": f"t{index}", "output_ids": ids, "meta_info": meta | given}


@pytest.fixture
def client() -> Iterator[FakeClient]:
    """A fake engine; after the test nothing may be running in it."""
    fake = FakeClient()
    yield fake
    assert not fake.live
    assert fake.closed == len(fake.requests)
