"""Bad requests: the error says what, got and fix, nothing is lost, the engine lives."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tokenspeed_rl import Engine
from tokenspeed_rl.errors import (
    RequestError,
)
from tokenspeed_rl.requests import GenerateReqInput

GREEDY = {"temperature": 0, "max_new_tokens": 4}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
USER = {"role": "user", "content": "a"}


def generate(**arguments: Any) -> Callable[[Engine], Any]:
    return lambda engine: engine.generate(**arguments)


def params(**fields: Any) -> Callable[[Engine], Any]:
    return lambda engine: engine.generate(input_ids=[1], sampling_params=fields)


REQUESTS: dict[str, tuple[Callable[[Engine], Any], str]] = {
    "no prompt": (generate(), "text or input_ids"),
    "two prompts": (generate(prompt="a", input_ids=[1]), "only one of"),
    "empty text": (generate(prompt=""), "non-empty string"),
    "empty list of texts": (generate(prompt=[]), "non-empty string"),
    "an empty text of two": (generate(prompt=["a", ""]), "non-empty string"),
    "text of bytes": (generate(prompt=b"a"), "non-empty string"),
    "ids as text": (generate(prompt=[1, 2]), "non-empty string"),
    "text that can't be encoded": (generate(prompt="a\ud800"), r"tokenizer refuses .*ud800"),
    "empty ids": (generate(input_ids=[]), "non-empty list"),
    "empty ids of two": (generate(input_ids=[[1], []]), r"input_ids\[1\] must be a non-empty"),
    "empty tensor": (generate(input_ids=torch.zeros(0, dtype=torch.int64)), "non-empty list"),
    "ids of floats": (generate(input_ids=[1, 2.0]), r"input_ids\[1\] must be an integer \(got 2.0\)"),
    "float tensor": (generate(input_ids=torch.ones(2)), "must be an integer"),
    "ids of bools": (generate(input_ids=[True]), "must be an integer"),
    "ids of a cube": (generate(input_ids=torch.ones(1, 1, 1, dtype=torch.int64)), "must be an integer"),
    "ids of both kinds": (generate(input_ids=[[1], 2]), r"input_ids\[1\]"),
    "ids of none": (generate(input_ids=[None]), "must be an integer"),
    "one id": (generate(input_ids=7), "non-empty list"),
    "ids in a set": (generate(input_ids={1, 2}), "non-empty list"),
    "id past the vocabulary": (generate(input_ids=[1, 256]), r"0 \.\. 255.*got 256"),
    "negative id": (generate(input_ids=[[1], [-1]]), r"input_ids\[1\].*got -1"),
    "huge id": (generate(input_ids=[10**30]), r"0 \.\. 255"),
    "prompt of the context": (generate(input_ids=[1] * 256), "context of 256"),
    "prompt past the context": (generate(input_ids=[[1], [1] * 300]), "300 tokens.*context of 256"),
    "more than the cache": (params(max_new_tokens=1024), "KV capacity of 1024"),
    "unknown field": (generate(input_ids=[1], retrun_logprob=True), "Did you mean 'return_logprob'"),
    "wrong bool": (generate(input_ids=[1], return_logprob=1), "return_logprob must be True or False"),
    "wrong stream": (generate(input_ids=[1], stream="yes"), "stream must be True or False"),
    "timeout of a stream": (generate(input_ids=[1], stream=True, timeout=1), "not for streams"),
    "wrong timeout": (generate(input_ids=[1], timeout="soon"), "timeout must be a finite number"),
    "negative timeout": (generate(input_ids=[1], timeout=-1), "timeout must be at least 0"),
    "timeout that is no number": (generate(input_ids=[1], timeout=math.nan), "timeout must be a finite"),
    "logprobs past the prompt": (
        generate(input_ids=[1], return_logprob=True, logprob_start_len=1),
        "within the prompt of 1",
    ),
    "logprob options without logprobs": (generate(input_ids=[1], top_logprobs_num=2), "return_logprob=True"),
    "unknown kind": (generate(input_ids=[1], return_logprob=True, logprob_kinds=["cooked"]), "logprob_kinds"),
    "wrong rid": (generate(input_ids=[1], rid=5), "rid must be a non-empty string"),
    "list of rids for one": (generate(input_ids=[1], rid=["a"]), "rid must be a single one"),
    "one rid for a list": (generate(input_ids=[[1]], rid="a"), "rid must be a list of 1"),
    "wrong priority": (generate(input_ids=[1], priority=1.5), "priority must be an integer"),
    "params of another length": (
        generate(input_ids=[[1], [2]], sampling_params=[{}]),
        "a list of 2, one for each",
    ),
    "params of another type": (generate(input_ids=[1], sampling_params="greedy"), "sampling_params must be"),
    "unknown param": (params(temprature=1), "Did you mean 'temperature'"),
    "negative temperature": (params(temperature=-0.1), "temperature must be at least 0"),
    "infinite temperature": (params(temperature=math.inf), "temperature must be a finite number"),
    "top_p of 0": (params(top_p=0.0), "top_p must be above 0"),
    "top_k of -2": (params(top_k=-2), "top_k must be at least -1"),
    "n of 0": (params(n=0), "n must be at least 1"),
    "n as text": (params(n="two"), "n must be an integer"),
    "min above max": (params(min_new_tokens=5, max_new_tokens=4), "min_new_tokens must be at most"),
    "stop id past the vocabulary": (params(stop_token_ids=[256]), "stop_token_ids must be"),
    "bias past the vocabulary": (params(logit_bias={256: 1.0}), "logit_bias keys must be"),
    "empty stop string": (params(stop=[""]), "stop must be a non-empty"),
    "bad params of the second": (
        generate(input_ids=[[1], [2]], sampling_params=[{}, {"top_p": 2.0}]),
        "top_p must be at most 1",
    ),
    "no struct": (lambda e: e.client.generate_request({"input_ids": [1]}), "must be a GenerateReqInput"),
    "no struct for the facade": (lambda e: e.llm.generate("a"), "must be a GenerateReqInput"),
    "no coroutine": (lambda e: e.llm.run(5), "takes a coroutine"),
    "no messages": (lambda e: e.chat([]), "messages is empty"),
    "messages that are none": (lambda e: e.chat(["a"], chat_template=TEMPLATE), "chat template refuses"),
    "no chat template": (lambda e: e.chat([USER]), "chat template"),
    "broken chat template": (lambda e: e.chat([USER], chat_template="{% for"), "chat template refuses"),
    "template that raises": (
        lambda e: e.chat([USER], chat_template="{{ raise_exception('alternate roles') }}"),
        "alternate roles",
    ),
    "nothing to chat about": (
        lambda e: e.chat([{**USER, "content": ""}], chat_template=TEMPLATE),
        "non-empty",
    ),
    "abort of a list": (lambda e: e.abort(["a"]), "rid must be a string"),
    "dropping a number": (lambda e: e.client.drop_request_state(5), "rid must be a string"),
    "negative rows": (lambda e: e.get_weights_by_name("model.norm.weight", -1), "truncate_size must be"),
    "version that is no label": (lambda e: e.weights_changed(5), "version must be a non-empty string"),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_bad_requests(counter: Engine, step_gate: Any, name: str) -> None:
    """Issue 2, bad input: a typed error that says what and got, nothing of the call is queued, and a request
    in flight ends right."""
    call, message = REQUESTS[name]
    with step_gate(counter) as gate:
        running = counter.generate(input_ids=[5], sampling_params=GREEDY, stream=True)
        gate.wait()
        with pytest.raises(RequestError, match=message) as caught:
            call(counter)
        assert caught.value.what and str(caught.value).startswith(caught.value.what)
        assert counter.get_load()[0].num_reqs == 1
        gate.open()
        assert [t for m in running for t in m["output_ids"]] == [6, 7, 8, 9]


@pytest.mark.parametrize(
    "name", ["stream", "async", "async stream", "bar", "facade", "facade stream", "client"]
)
def test_one_bad_prompt_of_many(counter: Engine, step_gate: Any, name: str) -> None:
    """Issue 2: a batch with one bad prompt queues nothing, whichever way it is submitted."""
    ids = [[1], [2, 3], [4, 999], [5]]
    obj = GenerateReqInput(input_ids=ids, rid=list("abcd"))
    calls: dict[str, Callable[[], Any]] = {
        "stream": lambda: counter.generate(input_ids=ids, stream=True),
        "async": lambda: asyncio.run(counter.async_generate(input_ids=ids)),
        "async stream": lambda: asyncio.run(counter.async_generate(input_ids=ids, stream=True)),
        "bar": lambda: counter.generate(input_ids=ids, use_tqdm=True),
        "facade": lambda: counter.llm.generate(obj),
        "facade stream": lambda: counter.llm.generate_stream(obj),
        "client": lambda: counter.client.generate_request(obj),
    }
    with step_gate(counter):
        with pytest.raises(RequestError, match=r"input_ids\[2\].*got 999"):
            calls[name]()
        assert counter.get_load()[0].num_reqs == 0
    good = counter.generate(
        input_ids=ids[:2], rid=["a", "b"], sampling_params={**GREEDY, "max_new_tokens": 1}
    )
    assert [result["output_ids"] for result in good] == [[2], [4]]
