"""Every member of EngineClient that moves requests, memory or weights does what it says, through the protocol
alone."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.protocol.conftest import MakeClient, only
from tests.tiny import Tiny
from tokenspeed_rl import EngineClient
from tokenspeed_rl.errors import EngineStateError
from tokenspeed_rl.requests import (
    DestroyWeightsUpdateGroupReqInput,
    GenerateReqInput,
    GetWeightsByNameReqInput,
    InitWeightsUpdateGroupReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
)
from tokenspeed_rl.weights import WeightsSender

PROMPT = Tiny.prompt(19)
OLD, NEW = Tiny.model(), Tiny.model(seed=1)
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 6}


def asked(**fields: Any) -> GenerateReqInput:
    return GenerateReqInput(
        **{"input_ids": PROMPT, "sampling_params": GREEDY, "return_logprob": True, **fields}
    )


def greedy(model: Any) -> list[int]:
    ids = list(PROMPT)
    for _ in range(GREEDY["max_new_tokens"]):
        ids.append(int(Tiny.logits(model, ids)[-1].argmax()))
    return ids[len(PROMPT) :]


def named(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


async def ids_of(client: EngineClient) -> list[int]:
    output = await asyncio.wait_for(only(client.generate_request(asked())), 60)
    ids: list[int] = output["output_ids"]
    return ids


async def state_of(client: EngineClient) -> dict[Any, Any]:
    (state,) = await client.get_internal_state()
    return state


def long(rid: str) -> GenerateReqInput:
    return asked(rid=rid, sampling_params={"temperature": 0, "max_new_tokens": 200}, stream=True)


async def test_attributes(make_client: MakeClient, tmp_path: Path) -> None:
    """server_args, model_config, tokenizer, model_path, served_model_name, is_generation, is_image_gen,
    last_receive_tstamp, gracefully_exit."""
    OLD.save_pretrained(tmp_path / "policy")
    Tiny.tokenizer().save_pretrained(tmp_path / "policy")
    client: Any = make_client(str(tmp_path / "policy"), page_size=8)
    assert client.server_args.page_size == 8 and client.model_config.vocab_size == 256
    assert client.tokenizer.decode([65]) == "A"
    assert client.model_path == str(tmp_path / "policy") and client.served_model_name == "policy"
    assert client.is_generation and not client.is_image_gen
    assert client.last_receive_tstamp == 0.0
    before = time.time()
    await ids_of(client)
    assert before <= client.last_receive_tstamp <= time.time()
    assert not client.gracefully_exit
    client.shutdown()
    assert client.gracefully_exit


async def test_generate_request(make_client: MakeClient) -> None:
    client = make_client(OLD)
    output = await only(client.generate_request(asked()))
    assert output["output_ids"] == greedy(OLD) and Tiny.gap(OLD, PROMPT, output) < 1e-4
    pair = await only(client.generate_request(asked(input_ids=[PROMPT, PROMPT[:5]])))
    assert [len(one["output_ids"]) for one in pair] == [6, 6] and pair[0]["output_ids"] == greedy(OLD)
    deltas = [message async for message in client.generate_request(asked(stream=True))]
    assert [token for message in deltas for token in message["output_ids"]] == greedy(OLD)


async def test_abort_request(make_client: MakeClient) -> None:
    client = make_client(OLD)
    messages = client.generate_request(long("a"))
    first = await anext(messages)
    client.abort_request("a")
    rest = [message async for message in messages]
    assert rest[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    ids = [*first["output_ids"], *(token for message in rest for token in message["output_ids"])]
    assert rest[-1]["meta_info"]["completion_tokens"] == len(ids) < 200
    client.abort_request("a")  # finished: no-op


async def test_drop_request_state(make_client: MakeClient) -> None:
    client = make_client(OLD)
    messages = client.generate_request(long("a"))
    await anext(messages)
    client.drop_request_state("a")
    last = [message async for message in messages][-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    again = await only(client.generate_request(asked(rid="a")))  # the id is free
    assert again["output_ids"] == greedy(OLD)


async def test_flush_cache(make_client: MakeClient) -> None:
    client = make_client(OLD)
    await ids_of(client)
    warm = await only(client.generate_request(asked()))
    assert warm["meta_info"]["cached_tokens"] == 16
    assert (await client.flush_cache()).success
    pages = (await state_of(client))["pages"]
    assert pages["free"] == pages["total"] and pages["cached"] == 0
    cold = await only(client.generate_request(asked()))
    assert cold["meta_info"]["cached_tokens"] == 0 and cold["output_ids"] == warm["output_ids"]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep", "retract"])
async def test_pause_scheduler_and_resume_scheduler(make_client: MakeClient, mode: str) -> None:
    client = make_client(OLD)
    expected = [token async for m in client.generate_request(long("r")) for token in m["output_ids"]]
    messages = client.generate_request(long("a"))
    got = list((await anext(messages))["output_ids"])
    assert await client.pause_scheduler(mode=mode) and await client.is_scheduler_paused()
    later = asyncio.ensure_future(ids_of(client))
    if mode in ("keep", "retract"):
        assert (await client.get_load())[0].num_reqs >= 1 and not later.done()
    assert await client.resume_scheduler() and not await client.is_scheduler_paused()
    last: dict[str, Any] = {}
    async for last in messages:
        got += last["output_ids"]
    if mode == "abort":
        assert last["meta_info"]["finish_reason"]["type"] == "abort" and got == expected[: len(got)]
    else:
        assert last["meta_info"]["finish_reason"]["type"] == "length" and got == expected
    assert await later == greedy(OLD)


async def test_is_scheduler_paused(make_client: MakeClient) -> None:
    client = make_client(OLD)
    assert not await client.is_scheduler_paused()
    assert await client.pause_scheduler() and await client.is_scheduler_paused()
    assert not await client.pause_scheduler(mode="sideways") and await client.is_scheduler_paused()
    assert "sideways" in (await state_of(client))["last_refusal"]


async def test_update_weights_from_tensor(make_client: MakeClient) -> None:
    client = make_client(OLD.config)
    done, message = await client.update_weights_from_tensor(
        UpdateWeightsFromTensorReqInput(named_tensors=named(NEW), weight_version="new")
    )
    assert done and "'new'" in message
    assert await ids_of(client) == greedy(NEW) and (await state_of(client))["weight_version"] == "new"
    done, why = await client.update_weights_from_tensor(
        UpdateWeightsFromTensorReqInput(named_tensors={"model.norm.weigth": torch.zeros(64)})
    )
    assert not done and "model.norm.weigth" in why and await ids_of(client) == greedy(NEW)


async def test_update_weights_from_disk(make_client: MakeClient, tmp_path: Path) -> None:
    client = make_client(OLD.config)
    NEW.save_pretrained(tmp_path)
    done, message, retracted = await client.update_weights_from_disk(
        UpdateWeightFromDiskReqInput(model_path=str(tmp_path))
    )
    assert done and message and retracted == 0 and client.model_path == str(tmp_path)
    assert await ids_of(client) == greedy(NEW)
    done, why, _ = await client.update_weights_from_disk(UpdateWeightFromDiskReqInput(model_path="nowhere"))
    assert not done and "nowhere" in why and client.model_path == str(tmp_path)


async def test_weights_update_group(make_client: MakeClient) -> None:
    """init_weights_update_group, update_weights_from_distributed, destroy_weights_update_group."""
    client: Any = make_client(OLD.config)
    sender = WeightsSender("127.0.0.1", 0, 2, group_name="g", backend="gloo", timeout=60)
    try:
        joined = await client.init_weights_update_group(
            InitWeightsUpdateGroupReqInput(
                master_address="127.0.0.1",
                master_port=sender.master_port,
                rank_offset=1,
                world_size=2,
                group_name="g",
                backend="gloo",
            )
        )
        assert joined[0]
        weights = named(NEW)
        sending = asyncio.ensure_future(asyncio.to_thread(sender.send, weights))
        done, why = await client.update_weights_from_distributed(
            UpdateWeightsFromDistributedReqInput(
                names=list(weights),
                dtype_names=["float32"] * len(weights),
                shapes=[list(tensor.shape) for tensor in weights.values()],
                group_name="g",
            )
        )
        await sending
        assert done, why
        assert await ids_of(client) == greedy(NEW)
        left, _ = await client.destroy_weights_update_group(DestroyWeightsUpdateGroupReqInput(group_name="g"))
        assert left
        again, why = await client.destroy_weights_update_group(
            DestroyWeightsUpdateGroupReqInput(group_name="g")
        )
        assert not again and "'g'" in why
    finally:
        sender.close()


async def test_get_weights_by_name(make_client: MakeClient) -> None:
    client = make_client(OLD)
    name = "model.layers.1.self_attn.k_proj.weight"
    rows = await client.get_weights_by_name(GetWeightsByNameReqInput(name=name, truncate_size=3))
    assert torch.equal(torch.tensor(rows), named(OLD)[name][:3])


async def test_release_and_resume_memory_occupation(make_client: MakeClient) -> None:
    """release_memory_occupation, resume_memory_occupation, is_sleeping."""
    client: Any = make_client(OLD.config, weights_backup="cpu")
    before = await ids_of(client)
    assert not await client.is_sleeping()
    held = client.memory_report()
    await client.release_memory_occupation(ReleaseMemoryOccupationReqInput())
    asleep = client.memory_report()
    assert await client.is_sleeping() and held["kv_cache"]["mapped"] > 0 < held["weights"]["mapped"]
    assert asleep["kv_cache"]["mapped"] == asleep["weights"]["mapped"] == 0
    with pytest.raises(EngineStateError):
        await client.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags="weights"))
    waiting = asyncio.ensure_future(ids_of(client))
    await client.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=["weights"]))
    assert await client.is_sleeping() and not waiting.done()
    await client.resume_memory_occupation(ResumeMemoryOccupationReqInput())
    assert not await client.is_sleeping() and await waiting == before
    assert client.memory_report()["kv_cache"]["mapped"] == held["kv_cache"]["mapped"]


async def test_get_load(make_client: MakeClient) -> None:
    client = make_client(OLD, max_running_requests=1)
    assert await client.pause_scheduler(mode="keep")
    streams = [client.generate_request(long(rid)) for rid in "ab"]
    (load,) = await client.get_load()
    assert (load.dp_rank, load.num_reqs, load.num_waiting_reqs, load.num_pages) == (0, 2, 2, 0)
    await client.resume_scheduler()
    await anext(streams[0])
    assert await client.pause_scheduler(mode="keep")
    (load,) = await client.get_load()
    assert (load.num_reqs, load.num_waiting_reqs) == (2, 1) and load.num_pages >= 2
    await client.pause_scheduler(mode="abort")
    (load,) = await client.get_load()
    assert (load.num_reqs, load.num_waiting_reqs, load.num_pages) == (0, 0, 0)
