"""After shutdown every call raises at once, but for those that may still be made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tokenspeed_rl import Engine, requests
from tokenspeed_rl.errors import EngineShutdownError
from tokenspeed_rl.requests import GenerateReqInput

GREEDY = {"temperature": 0, "max_new_tokens": 4}
CALLS: dict[str, Callable[[Engine], Any]] = {
    "generate": lambda e: e.generate(input_ids=[1]),
    "generate stream": lambda e: e.generate(input_ids=[1], stream=True),
    "generate with a bar": lambda e: e.generate(input_ids=[1], use_tqdm=True),
    "generate wait": lambda e: e.generate(input_ids=[1], wait=True),
    "async_generate": lambda e: asyncio.run(e.async_generate(input_ids=[1])),
    "async_generate stream": lambda e: asyncio.run(e.async_generate(input_ids=[1], stream=True)),
    "chat": lambda e: e.chat([{"role": "user", "content": "a"}], chat_template="a"),
    "encode": lambda e: e.encode(input_ids=[1]),
    "pause": lambda e: e.pause(),
    "resume": lambda e: e.resume(),
    "release": lambda e: e.release_memory_occupation(),
    "resume memory": lambda e: e.resume_memory_occupation(),
    "update from tensor": lambda e: e.update_weights_from_tensor({}),
    "update from distributed": lambda e: e.update_weights_from_distributed([], [], []),
    "update from disk": lambda e: e.update_weights_from_disk("/nowhere"),
    "init group": lambda e: e.init_weights_update_group(
        master_address="h", master_port=1, rank_offset=1, world_size=2
    ),
    "destroy group": lambda e: e.destroy_weights_update_group("g"),
    "get weights": lambda e: e.get_weights_by_name("model.norm.weight"),
    "checksum": lambda e: e.weights_checksum(),
    "parameters": lambda e: e.named_parameters(),
    "changed": lambda e: e.weights_changed(),
    "flush": lambda e: e.flush_cache(),
    "open session": lambda e: e.open_session(10),
    "close session": lambda e: e.close_session("s"),
    "load": lambda e: e.get_load(),
    "state": lambda e: e.get_internal_state(),
    "set state": lambda e: e.set_internal_state(),
    "start profile": lambda e: e.start_profile(),
    "stop profile": lambda e: e.stop_profile(),
    "start experts": lambda e: e.start_expert_distribution_record(),
    "stop experts": lambda e: e.stop_expert_distribution_record(),
    "dump experts": lambda e: e.dump_expert_distribution_record(),
    "memory report": lambda e: e.memory_report(),
    "paused": lambda e: e.paused("keep").__enter__(),
    "resident": lambda e: e.resident("weights").__enter__(),
    "llm.generate": lambda e: e.llm.generate(GenerateReqInput(input_ids=[1])),
    "llm.generate_stream": lambda e: e.llm.generate_stream(GenerateReqInput(input_ids=[1])),
    "client.generate_request": lambda e: e.client.generate_request(GenerateReqInput(input_ids=[1])),
    "client.embed": lambda e: e.client.generate_request(requests.EmbeddingReqInput(input_ids=[1])),
    "client.drop_request_state": lambda e: e.client.drop_request_state("r"),
    "client.mark_server_up": lambda e: e.client.mark_server_up(),
    "client.mark_server_unhealthy": lambda e: e.client.mark_server_unhealthy(),
    "client.configure_logging": lambda e: e.client.configure_logging(requests.ConfigureLoggingReq()),
    "client.pause_scheduler": lambda e: asyncio.run(e.client.pause_scheduler()),
    "client.resume_scheduler": lambda e: asyncio.run(e.client.resume_scheduler()),
    "client.get_load": lambda e: asyncio.run(e.client.get_load()),
    "client.flush_cache": lambda e: asyncio.run(e.client.flush_cache()),
    "client.weights_checksum": lambda e: asyncio.run(e.client.weights_checksum()),
    "client.set_internal_state": lambda e: asyncio.run(
        e.client.set_internal_state(requests.SetInternalStateReq())
    ),
}


@pytest.fixture(scope="module")
def ended(tiny: Any) -> Engine:
    engine = Engine(tiny.successor(), tokenizer=tiny.tokenizer(), max_total_tokens=256)
    engine.generate(input_ids=[1], sampling_params=GREEDY)
    engine.shutdown()
    return engine


@pytest.mark.parametrize("name", CALLS)
def test_calls_after_shutdown(ended: Engine, name: str) -> None:
    """G8: after shutdown every member raises EngineShutdownError at once."""
    with pytest.raises(EngineShutdownError):
        CALLS[name](ended)


def test_what_may_be_called_after_shutdown(ended: Engine) -> None:
    """G8: `shutdown`, `abort` and the `is_*` members work after shutdown."""
    ended.abort()
    ended.abort("r")
    ended.client.abort_request("r")
    ended.shutdown()
    ended.client.shutdown()
    ended.llm.shutdown()
    assert not ended.is_paused() and not ended.is_sleeping()
    assert not asyncio.run(ended.client.is_sleeping()) and not asyncio.run(ended.client.is_scheduler_paused())
    assert not ended.client.is_server_starting() and ended.client.gracefully_exit
    assert ended.client.last_receive_tstamp > 0
