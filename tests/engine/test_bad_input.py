"""Bad input at every public edge: the error says what, got and fix, nothing is lost, the engine lives."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, PretrainedConfig

from tokenspeed_rl import AsyncLLM, Engine, EngineConfig, requests
from tokenspeed_rl.errors import (
    ConfigError,
    EngineStateError,
    OutOfMemoryError,
    RequestError,
    TokenSpeedError,
    UnavailableError,
    WeightUpdateError,
)
from tokenspeed_rl.requests import GenerateReqInput

GREEDY = {"temperature": 0, "max_new_tokens": 4}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
USER = {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def counter(tiny: Any) -> Iterator[Engine]:
    """Its greedy output after token t is t + 1, t + 2 ...; context 256, KV capacity 512 tokens."""
    with Engine(tiny.successor(), tokenizer=tiny.tokenizer(), max_total_tokens=512) as engine:
        yield engine


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
    "more than the cache": (params(max_new_tokens=600), "KV capacity of 512"),
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


LATER: dict[str, Callable[[Engine], Any]] = {
    "pause": lambda e: e.pause("retract"),
    "set_internal_state": lambda e: e.set_internal_state(server_args={"max_running_requests": 2}),
    "update_weights_from_tensor": lambda e: e.update_weights_from_tensor({"a": torch.zeros(1)}),
    "update_weights_from_distributed": lambda e: e.update_weights_from_distributed(["a"], ["float32"], [[1]]),
    "update_weights_from_disk": lambda e: e.update_weights_from_disk("/nowhere"),
    "init_weights_update_group": lambda e: e.init_weights_update_group(
        master_address="localhost", master_port=1, rank_offset=1, world_size=2
    ),
    "destroy_weights_update_group": lambda e: e.destroy_weights_update_group("g"),
    "open_session": lambda e: e.open_session(10),
    "close_session": lambda e: e.close_session("s"),
    "configure_logging": lambda e: e.client.configure_logging(
        requests.ConfigureLoggingReq(log_requests=True)
    ),
    "release_memory_occupation": lambda e: e.release_memory_occupation(["kv_cache"]),
    "resume_memory_occupation": lambda e: e.resume_memory_occupation(),
    "start_profile": lambda e: e.start_profile(),
    "stop_profile": lambda e: e.stop_profile(),
    "start_expert_distribution_record": lambda e: e.start_expert_distribution_record(),
    "stop_expert_distribution_record": lambda e: e.stop_expert_distribution_record(),
    "dump_expert_distribution_record": lambda e: e.dump_expert_distribution_record(),
    "memory_report": lambda e: e.memory_report(),
    "paused": lambda e: e.paused("keep"),
    "resident": lambda e: e.resident("weights"),
    "encode": lambda e: e.encode("a"),
    "session_params": generate(input_ids=[1], session_params={"id": "s"}),
    "lora": generate(input_ids=[1], lora="adapter"),
    "return_routed_experts": generate(input_ids=[1], return_routed_experts=True),
}


@pytest.mark.parametrize("name", LATER)
def test_what_this_version_lacks(counter: Engine, name: str) -> None:
    """Issue 2: members of later issues are refused by the blocking engine with a typed error that names them;
    the engine goes on as it was."""
    with pytest.raises(UnavailableError, match=name) as caught:
        LATER[name](counter)
    assert isinstance(caught.value, EngineStateError)
    result = counter.generate(input_ids=[1], sampling_params={**GREEDY, "max_new_tokens": 2})
    assert result["output_ids"] == [2, 3]


def test_refusals_of_the_client_keep_their_reason(counter: Engine) -> None:
    """Contract 2: the client returns refusals where it can: a tuple with `.report`, or a bool whose reason is
    `last_refusal`."""
    client, run = counter.client, counter.llm.run
    group = dict(master_address="localhost", master_port=1, rank_offset=1, world_size=2)
    tuples = {
        "update_weights_from_disk": requests.UpdateWeightFromDiskReqInput(model_path="/nowhere"),
        "init_weights_update_group": requests.InitWeightsUpdateGroupReqInput(**group),
        "destroy_weights_update_group": requests.DestroyWeightsUpdateGroupReqInput(group_name="g"),
        "update_weights_from_distributed": requests.UpdateWeightsFromDistributedReqInput(
            names=[], dtype_names=[], shapes=[]
        ),
        "update_weights_from_tensor": requests.UpdateWeightsFromTensorReqInput(named_tensors=[]),
    }
    for name, obj in tuples.items():
        reply = run(getattr(client, name)(obj))
        done, message, *rest = reply
        assert done is False and name in message and len(rest) == (name == "update_weights_from_disk")
        assert isinstance(reply, tuple) and isinstance(reply.report, UnavailableError)
        assert counter.get_internal_state()[0]["last_refusal"] == message
    assert run(client.pause_scheduler(mode="keep")) is False
    assert "pause_scheduler" in counter.get_internal_state()[0]["last_refusal"]
    assert run(client.set_internal_state(requests.SetInternalStateReq(weight_version="x"))) == [False]
    assert "set_internal_state" in counter.get_internal_state()[0]["last_refusal"]
    assert run(client.resume_scheduler()) is True and counter.resume() is True


MODELS: dict[str, tuple[Any, str]] = {
    "number": (5, "model must be a directory, a hub id"),
    "none": (None, "model must be a directory, a hub id"),
    "config class": (PretrainedConfig, "model must be a directory, a hub id"),
    "some module": (torch.nn.Linear(2, 2), "must be a transformers causal LM"),
    "missing directory": ("/nowhere/at all", "does not exist"),
    "unsupported config": (
        GPT2Config(),
        "gpt2.*Supported: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
    ),
}
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"max_toknes": 5}, "Did you mean"),
    "wrong type": ({"page_size": "16"}, "page_size must be of type int"),
    "out of range": ({"mem_fraction": 2.0}, "mem_fraction must be above 0 and at most 1"),
    "two at once": ({"page_size": 0, "seed": -1}, "(?s)page_size.*seed"),
    "later": ({"tp_size": 2}, "tp_size must be 1"),
    "no config": ({"config": {"page_size": 16}}, "config must be an EngineConfig"),
    "process group": ({"process_group": object()}, "process_group"),
    "dtype of a live model": ({"dtype": "bfloat16"}, "live model is float32.*got 'bfloat16'"),
    "device of a live model": ({"device": "cuda"}, "live model is on cpu.*got 'cuda'"),
    "context": ({"max_model_len": 257}, "256 positions.*got 257"),
    "less than a page": ({"max_total_tokens": 15}, "max_total_tokens must be at least page_size, 16"),
    "another model's path": ({"model_path": "/some/model"}, "model_path names another model"),
    "revision of a live model": ({"revision": "main"}, "revision is for hub ids"),
    "format of a live model": ({"load_format": "dummy"}, "a live model has its weights"),
    "no tokenizer": ({"tokenizer": "gpt2"}, "tokenizer must be a transformers tokenizer"),
}


def refused(error: type[TokenSpeedError], message: str, model: Any, **settings: Any) -> None:
    """Neither engine can be built so, and nothing is left of the tries."""
    before = set(threading.enumerate())
    for kind in (Engine, AsyncLLM):
        with pytest.raises(error, match=message):
            kind(model, **settings)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("name", MODELS)
def test_bad_models(name: str) -> None:
    """Issue 2: what is no model, isn't there or isn't supported (the error lists what is)."""
    model, message = MODELS[name]
    refused(ConfigError, message, model)


@pytest.mark.parametrize("name", SETTINGS)
def test_bad_settings(tiny: Any, make_engine: Any, name: str) -> None:
    """Issue 2: unknown, malformed and contradictory settings are refused, none is ignored, and the live model
    is left as it was."""
    settings, message = SETTINGS[name]
    model = tiny.successor()
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    refused(ConfigError, message, model, **settings)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert make_engine(model).generate(input_ids=[1], sampling_params={**GREEDY, "max_new_tokens": 1})


def test_a_tokenizer_that_would_be_ignored(tiny: Any) -> None:
    """A tokenizer beside `skip_tokenizer_init=True`, and files for a config, contradict each other."""
    refused(
        ConfigError, "skip_tokenizer_init", tiny.model(), tokenizer=tiny.tokenizer(), skip_tokenizer_init=True
    )
    refused(ConfigError, "a config has no files", tiny.config(), load_format="safetensors")


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return edit


FILES: dict[str, tuple[Callable[[Path], Any], type[TokenSpeedError], str]] = {
    "truncated": (truncate, ConfigError, "truncated"),
    "empty": (lambda d: (d / "model.safetensors").write_bytes(b""), ConfigError, "no intact safetensors"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), ConfigError, "holds neither"),
    "no config": (lambda d: (d / "config.json").unlink(), ConfigError, "config.json is missing"),
    "broken config": (lambda d: (d / "config.json").write_text("{"), ConfigError, "can't be read"),
    "unsupported": (
        edit_config(architectures=["GPT2LMHeadModel"], model_type="gpt2"),
        ConfigError,
        "GPT2LMHeadModel.*Supported: LlamaForCausalLM, Mistral",
    ),
    "too few layers": (edit_config(num_hidden_layers=3), WeightUpdateError, "9 missing"),
    "another size": (edit_config(vocab_size=300), WeightUpdateError, "mis-shaped"),
}


@pytest.mark.parametrize("name", FILES)
def test_bad_files(tiny: Any, tmp_path: Path, name: str) -> None:
    """Issue 2: a truncated, incomplete or unsupported model directory names the file or the tensors."""
    spoil, error, message = FILES[name]
    tiny.model().save_pretrained(tmp_path)
    spoil(tmp_path)
    refused(error, message, tmp_path)
    refused(error, message, str(tmp_path))


def test_a_cache_that_can_not_be_allocated(tiny: Any, make_engine: Any) -> None:
    """An allocator that gives nothing is an OutOfMemoryError with what was wanted; the engine lives."""
    huge = 1 << 52
    engine = make_engine(tiny.successor(), max_total_tokens=huge, max_running_requests=huge)
    for _ in range(2):
        with pytest.raises(OutOfMemoryError, match="KV cache") as caught:
            engine.generate(input_ids=[1])
        assert caught.value.wanted > 1 << 52
    assert engine.get_load()[0].num_reqs == 0


def test_the_callers_config_stays_the_callers(tiny: Any, make_engine: Any) -> None:
    """Overrides and running change nothing in the config, the parameters or the ids that were passed."""
    config, ids, sampling = EngineConfig(page_size=8), [[1, 2], [3]], {"n": 2, "max_new_tokens": 2}
    engine = make_engine(tiny.model(), config=config, seed=5)
    engine.generate(input_ids=ids, sampling_params=sampling)
    assert config == EngineConfig(page_size=8)
    assert ids == [[1, 2], [3]] and sampling == {"n": 2, "max_new_tokens": 2}
    assert engine.client.server_args.seed == 5 and engine.client.server_args.page_size == 8
