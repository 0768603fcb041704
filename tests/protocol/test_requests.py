"""The protocol's structs, and how a request becomes one checked request per prompt."""

import dataclasses
import inspect
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_rl import SamplingParams, requests
from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.requests import EmbeddingReqInput, GenerateReqInput

CONTRACT = {
    "GenerateReqInput": "text input_ids sampling_params rid return_logprob logprob_start_len "
    "top_logprobs_num token_ids_logprob logprob_kinds return_text_in_logprobs return_sampling_mask "
    "return_routed_experts return_hidden_states stream session_params priority lora",
    "EmbeddingReqInput": "text input_ids rid",
    "OpenSessionReqInput": "capacity_of_str_len session_id",
    "CloseSessionReqInput": "session_id",
    "FlushCacheReqOutput": "success message",
    "ConfigureLoggingReq": "log_requests log_requests_level dump_requests_folder dump_requests_threshold",
    "InitWeightsUpdateGroupReqInput": "master_address master_port rank_offset world_size "
    "group_name backend timeout",
    "DestroyWeightsUpdateGroupReqInput": "group_name",
    "UpdateWeightsFromDistributedReqInput": "names dtype_names shapes group_name flush_cache weight_version "
    "load_format partial atomic timeout",
    "UpdateWeightsFromTensorReqInput": "named_tensors serialized_named_tensors load_format flush_cache "
    "weight_version partial atomic timeout",
    "UpdateWeightFromDiskReqInput": "model_path load_format weight_version flush_cache",
    "GetWeightsByNameReqInput": "name truncate_size",
    "ReleaseMemoryOccupationReqInput": "tags",
    "ResumeMemoryOccupationReqInput": "tags",
    "SetInternalStateReq": "server_args weight_version",
    "GetLoadReqOutput": "dp_rank num_reqs num_waiting_reqs num_pages",
}


def test_structs_have_the_promised_fields() -> None:
    """Other people's code builds these by keyword: names are fixed."""
    found = {
        name: [field.name for field in dataclasses.fields(kind)]
        for name, kind in inspect.getmembers(requests, dataclasses.is_dataclass)
        if kind.__module__ == requests.__name__
    }
    assert found == {name: fields.split() for name, fields in CONTRACT.items()}


def only(request: GenerateReqInput, **known: Any) -> GenerateReqInput:
    [single] = request.split(**known)
    return single


EVERY_FIELD = GenerateReqInput(
    input_ids=[[1, 2], [3]],
    sampling_params=SamplingParams(n=2, seed=3),
    rid=["a", "b"],
    return_logprob=True,
    logprob_start_len=1,
    top_logprobs_num=2,
    token_ids_logprob=(4, 5),
    logprob_kinds=("raw", "processed"),
    return_text_in_logprobs=True,
    return_sampling_mask=True,
    return_routed_experts=True,
    return_hidden_states=True,
    stream=True,
    session_params={"id": "s"},
    priority=7,
    lora="adapter",
)


def test_split_keeps_every_field() -> None:
    """F8: what is asked of a batch is asked for each of its prompts; no field here is at its default."""
    own = ("text", "input_ids", "sampling_params", "rid")
    for field in dataclasses.fields(GenerateReqInput):
        assert field.name == "text" or getattr(EVERY_FIELD, field.name) != field.default
    for single, ids, rid in zip(EVERY_FIELD.split(), [(1, 2), (3,)], ["a", "b"], strict=True):
        assert (single.input_ids, single.rid, single.text, single.is_batch) == (ids, rid, None, False)
        assert isinstance(single.sampling_params, SamplingParams)
        assert (single.sampling_params.n, single.sampling_params.seed) == (2, 3)
        for field in dataclasses.fields(GenerateReqInput):
            assert field.name in own or getattr(single, field.name) == getattr(EVERY_FIELD, field.name)


@pytest.mark.parametrize(
    ("given_ids", "batch", "expected"),
    [
        ([5, 6], False, [(5, 6)]),
        ((5,), False, [(5,)]),
        (range(3), False, [(0, 1, 2)]),
        ([[5, 6]], True, [(5, 6)]),
        (np.array([5, 6]), False, [(5, 6)]),
        (torch.tensor([5, 6]), False, [(5, 6)]),
        (list(np.array([5, 6])), False, [(5, 6)]),
        (list(torch.tensor([5, 6])), False, [(5, 6)]),
        ([torch.tensor([5, 6]), [7]], True, [(5, 6), (7,)]),
        (torch.tensor([[5, 6], [7, 8]]), True, [(5, 6), (7, 8)]),
    ],
)
def test_token_ids_in_any_form(given_ids: Any, batch: bool, expected: list[tuple[int, ...]]) -> None:
    """Lists, ranges, numpy and torch: one prompt or a list of prompts, never mistaken, always plain ints."""
    request = GenerateReqInput(input_ids=given_ids)
    split = request.split(vocab_size=10)
    assert request.is_batch is batch and [single.input_ids for single in split] == expected
    assert all(type(i) is int for ids in expected for i in ids)


@pytest.mark.parametrize(
    "ids",
    [[], [[]], [[1], []], [-1], [256], [[1], [256]], [1.0], [True], [[1], 2], [1, [2]], [["1"]], [[[1]]],
     [None], "12", 5, None, {1: 2}, torch.tensor([1.0]), torch.tensor([], dtype=torch.long), torch.tensor(3),
     np.array([True])],
    ids=repr,
)  # fmt: skip
def test_bad_token_ids_are_refused(ids: Any) -> None:
    """Empty prompts, ids outside the vocabulary and what is no list of ids: a RequestError that says so."""
    with pytest.raises(RequestError) as caught:
        GenerateReqInput(input_ids=ids).split(vocab_size=256)
    assert "input_ids" in str(caught.value) and caught.value.fix
    with pytest.raises(RequestError):
        EmbeddingReqInput(input_ids=ids).split(vocab_size=256)


@pytest.mark.parametrize("text", ["", [], [""], ["a", ""], ["a", 3], 3, b"a", {"a": 1}], ids=repr)
def test_bad_text_is_refused(text: Any) -> None:
    """Empty or no text: a RequestError that says so."""
    with pytest.raises(RequestError, match="text must be"):
        GenerateReqInput(text=text).split()


def test_one_kind_of_prompt() -> None:
    """Exactly one of text and ids; text needs a tokenizer, ids need none."""
    with pytest.raises(RequestError, match="only one of text and input_ids"):
        GenerateReqInput(text="a", input_ids=[1]).split()
    with pytest.raises(RequestError, match="tokenizer"):
        GenerateReqInput(text="a").split(has_tokenizer=False)
    assert only(GenerateReqInput(input_ids=[1]), has_tokenizer=False).input_ids == (1,)
    assert [single.text for single in GenerateReqInput(text=["a", "b"]).split()] == ["a", "b"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": "a", "rid": ["x"]}, "rid must be a single one"),
        ({"text": ["a"], "rid": "x"}, "rid must be a list of 1"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid must be a list of 2"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "differ"),
        ({"text": "a", "rid": ""}, "rid must be a non-empty string"),
        ({"text": "a", "rid": 3}, "rid must be a non-empty string"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params must be a single one"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params must be a list of 2"),
        ({"text": "a", "sampling_params": {"top_q": 1}}, "top_q"),
        ({"text": "a", "sampling_params": 3}, "sampling_params must be"),
        ({"text": "a", "sampling_params": {"stop_token_ids": [99]}}, "stop_token_ids"),
        ({"text": "a", "top_logprobs_num": 2}, "top_logprobs_num needs return_logprob"),
        ({"text": "a", "logprob_start_len": 0}, "logprob_start_len needs return_logprob"),
        ({"text": "a", "logprob_kinds": ["raw"]}, "logprob_kinds needs return_logprob"),
        ({"text": "a", "return_logprob": True, "logprob_kinds": ["cooked"]}, "logprob_kinds"),
        ({"text": "a", "return_logprob": True, "logprob_kinds": []}, "logprob_kinds"),
        ({"text": "a", "return_logprob": True, "logprob_kinds": 3}, "logprob_kinds"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 51}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": [50]}, "token_ids_logprob"),
        ({"text": "a", "return_logprob": 1}, "return_logprob"),
        ({"text": "a", "stream": None}, "stream"),
        ({"text": "a", "priority": 0.5}, "priority"),
        ({"text": "a", "session_params": {"session": "x"}}, "session_params"),
        ({"text": "a", "lora": ""}, "lora"),
    ],
)
def test_bad_options_are_refused(fields: dict[str, Any], message: str) -> None:
    """Nothing is ignored: what can't be matched to a prompt, or would have no effect, is refused by name."""
    with pytest.raises(RequestError, match=message):
        GenerateReqInput(**fields).split(vocab_size=50)


def test_texts_of_logprobs_need_a_tokenizer() -> None:
    """Token in, token out works without one; asking for token texts doesn't."""
    request = GenerateReqInput(input_ids=[1], return_logprob=True, return_text_in_logprobs=True)
    with pytest.raises(RequestError, match="return_text_in_logprobs"):
        request.split(has_tokenizer=False)


def test_random_rids_differ_and_leave_the_rngs_alone() -> None:
    """F14: requests without a rid get one each, and no global random state moves for it."""
    state = torch.get_rng_state().tolist(), str(np.random.get_state())
    rids = {str(single.rid) for single in GenerateReqInput(input_ids=[[1]] * 100).split()}
    assert len(rids) == 100 and state == (torch.get_rng_state().tolist(), str(np.random.get_state()))


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4), min_size=1, max_size=5), st.data())
def test_split_is_in_order_and_one_to_one(prompts: list[list[int]], data: st.DataObject) -> None:
    """Prompt, parameters and rid that stand at one place stay together."""
    temperatures = data.draw(st.lists(st.floats(0, 2), min_size=len(prompts), max_size=len(prompts)))
    request = GenerateReqInput(
        input_ids=prompts,
        sampling_params=[{"temperature": t} for t in temperatures],
        rid=[f"r{i}" for i in range(len(prompts))],
    )
    for at, single in enumerate(request.split(vocab_size=100)):
        assert single.input_ids == tuple(prompts[at]) and single.rid == f"r{at}"
        assert isinstance(single.sampling_params, SamplingParams)
        assert single.sampling_params.temperature == temperatures[at]
