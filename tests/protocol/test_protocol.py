"""EngineClient against the contract, and AsyncLLM against EngineClient, member by member."""

import ast
import inspect
import typing
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from tokenspeed_rl import AsyncLLM, EngineClient, EngineConfig

CONTRACT = """
async def generate_request(
    self, obj: GenerateReqInput | EmbeddingReqInput) -> AsyncGenerator[dict[str, Any], None]: ...
def abort_request(self, rid: str) -> None: ...
async def open_session(self, obj: OpenSessionReqInput) -> str | None: ...
async def close_session(self, obj: CloseSessionReqInput) -> None: ...
async def flush_cache(self) -> FlushCacheReqOutput: ...
def configure_logging(self, obj: ConfigureLoggingReq) -> None: ...
async def pause_scheduler(self, *, mode: str = "abort") -> bool: ...
async def resume_scheduler(self) -> bool: ...
async def is_scheduler_paused(self) -> bool: ...
def is_server_starting(self) -> bool: ...
def mark_server_up(self) -> None: ...
def mark_server_unhealthy(self) -> None: ...
def drop_request_state(self, rid: str) -> None: ...
async def update_weights_from_disk(self, obj: UpdateWeightFromDiskReqInput) -> tuple[bool, str, Any]: ...
async def init_weights_update_group(self, obj: InitWeightsUpdateGroupReqInput) -> tuple[bool, str]: ...
async def update_weights_from_distributed(
    self, obj: UpdateWeightsFromDistributedReqInput) -> tuple[bool, str]: ...
async def update_weights_from_tensor(self, obj: UpdateWeightsFromTensorReqInput) -> tuple[bool, str]: ...
async def get_weights_by_name(self, obj: GetWeightsByNameReqInput) -> Any: ...
async def release_memory_occupation(self, obj: ReleaseMemoryOccupationReqInput) -> None: ...
async def resume_memory_occupation(self, obj: ResumeMemoryOccupationReqInput) -> None: ...
async def is_sleeping(self) -> bool: ...
async def start_profile(self, output_dir=None, start_step=None, num_steps=None, activities=None,
                        with_stack=None, record_shapes=None, profile_by_stage=False) -> Any: ...
async def stop_profile(self) -> Any: ...
async def start_expert_distribution_record(self) -> None: ...
async def stop_expert_distribution_record(self) -> None: ...
async def dump_expert_distribution_record(self) -> None: ...
async def get_internal_state(self) -> list[dict[Any, Any]]: ...
async def set_internal_state(self, obj: SetInternalStateReq) -> list[bool]: ...
async def get_load(self) -> list[GetLoadReqOutput]: ...
"""
ATTRIBUTES = {
    "server_args", "model_config", "tokenizer", "model_path", "served_model_name", "is_generation",
    "is_image_gen", "last_receive_tstamp", "gracefully_exit",
}  # fmt: skip
PROMISED = {
    node.name: node
    for node in ast.parse(CONTRACT).body
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
}


def kind_of(member: Callable[..., Any]) -> str:
    """What a call gives. A plain function that returns an async generator may do work at the call."""
    if inspect.iscoroutinefunction(member):
        return "coroutine"
    hint = typing.get_type_hints(member)["return"]
    returned = typing.get_origin(hint) or hint
    if isinstance(returned, type) and issubclass(returned, AsyncGenerator):
        return "async generator"
    return "value"


def test_protocol_has_exactly_the_promised_members() -> None:
    """Trainer-side code is written against these names, no more and no fewer."""
    members = {
        name for name, _ in inspect.getmembers(EngineClient, inspect.isfunction) if not name.startswith("_")
    }
    assert members == set(PROMISED)
    properties = {name for name, member in vars(EngineClient).items() if isinstance(member, property)}
    assert set(EngineClient.__annotations__) | properties == ATTRIBUTES


@pytest.mark.parametrize("name", PROMISED)
def test_protocol_signature(name: str) -> None:
    """Parameters, defaults, annotations and asyncness are those of the contract."""
    member, promised = getattr(EngineClient, name), PROMISED[name]
    scope: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{ast.unparse(promised)}", scope)
    ours, theirs = inspect.signature(member), inspect.signature(scope[name])
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]
    assert ours.return_annotation == theirs.return_annotation
    for ours_one, theirs_one in zip(ours.parameters.values(), theirs.parameters.values(), strict=True):
        assert theirs_one.annotation in (inspect.Parameter.empty, ours_one.annotation)
    is_async = isinstance(promised, ast.AsyncFunctionDef)
    assert kind_of(member) == (
        "async generator" if name == "generate_request" else "coroutine" if is_async else "value"
    )
    assert inspect.getdoc(member)


@pytest.mark.parametrize("name", PROMISED)
def test_async_llm_has_it(name: str) -> None:
    """AsyncLLM's own member has the protocol's parameters, defaults and types, and is as async."""
    ours, protocols = getattr(AsyncLLM, name), getattr(EngineClient, name)
    assert ours is not protocols, "inherited from the protocol: it would do nothing"
    mine, theirs = (inspect.signature(member, eval_str=True) for member in (ours, protocols))
    assert list(mine.parameters.values()) == list(theirs.parameters.values())
    assert name == "generate_request" or mine.return_annotation == theirs.return_annotation
    assert kind_of(ours) == kind_of(protocols)


def test_async_llm_inherits_the_protocol() -> None:
    """It is an EngineClient by declaration, so that mypy holds it to that, and has what goes beyond it."""
    assert EngineClient in AsyncLLM.__mro__
    assert inspect.iscoroutinefunction(AsyncLLM.destroy_weights_update_group)
    assert callable(AsyncLLM.shutdown) and callable(AsyncLLM.__aenter__)


def test_async_llm_has_the_attributes() -> None:
    """Every attribute of the protocol is there with its type, on an engine that has just started."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    client = AsyncLLM(config, device="cpu", max_total_tokens=64)
    try:
        assert isinstance(client, EngineClient)
        assert isinstance(client.server_args, EngineConfig) and client.model_config.vocab_size == 64
        assert client.tokenizer is None and isinstance(client.model_path, str)
        assert isinstance(client.served_model_name, str) and isinstance(client.last_receive_tstamp, float)
        assert (client.is_generation, client.is_image_gen, client.gracefully_exit) == (True, False, False)
    finally:
        client.shutdown()
