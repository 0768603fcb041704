"""How the tests make each call of the table. What a call leaves behind beside the state is cleared away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from tests.lifecycle.driven import FIELDS, GROUP, PROMPT, WAIT, Driven
from tests.lifecycle.state_table import ATTRIBUTES, EXPERTS, PROFILE
from tests.lifecycle.states import Call
from tokenspeed_rl import requests
from tokenspeed_rl.errors import WeightUpdateError

NORM = "model.norm.weight"
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a"}],
    "chat_template": bytes(PROMPT).decode(),
}
WITHIN = {"paused", "resident"}
SETTINGS: dict[str, Any] = {"server_args": {"enable_prefix_caching": True}, "weight_version": "x"}
KEYWORDS: dict[str, dict[str, Any]] = {
    "set_internal_state": SETTINGS,
    "configure_logging": {"log_requests": False},
}
OUTPUT: dict[str, Any] = {
    "output_ids": PROMPT[:1],
    "meta_info": {
        **{"prompt_ids": PROMPT, "completion_tokens": 1, "cached_tokens": 0},
        "weight_versions": [{"version": "", "start": 0, "end": 1}],
    },
}


def act(driven: Driven, call: Call) -> Any:
    """Make the call on this thread, and return what it returns."""
    if "session" in call.member or call.arguments == "session_params":
        return _with_session(driven, call)
    if "distributed" in call.member:
        return _with_sender(driven, call)
    if call.member == "init_weights_update_group":
        return _join(driven, call)
    if call.member == "destroy_weights_update_group":
        return _leave(driven, call)
    if call.member in EXPERTS:
        return _record(driven, call)
    if call.member in PROFILE:
        return _profile(driven, call)
    return _plain(driven, call)


def _profile(driven: Driven, call: Call) -> Any:
    """Between a start and a stop, one of which is the call."""
    folder = {"output_dir": f"{driven.path}/profiles"}
    target: Any = {"AsyncLLM": driven.engine.client, "Engine": driven.engine}[call.on]
    if call.member == "start_profile":
        answer = _result(target.start_profile(**folder))
        driven.engine.stop_profile()
        return answer
    if not driven.loop.closing:
        driven.engine.start_profile(**folder)
    return _result(target.stop_profile()) or None


def _plain(driven: Driven, call: Call) -> Any:
    engine = driven.engine
    target: Any = {"AsyncLLM": engine.client, "Engine": engine, "LLM": engine.llm}[call.on]
    member = getattr(target, call.member)
    if call.member in ATTRIBUTES:
        return member
    if call.on == "AsyncLLM":
        return _result(member(*_structs(driven, call), **_keywords(call)))
    if call.member in WITHIN:
        with member(*_arguments(driven, call)):
            assert (
                driven.engine.is_paused() if call.member == "paused" else not engine.client.asleep(*call.tags)
            )
        return None
    if call.member == "generate_stream":
        return list(member(*_structs(driven, call)))[-1]
    if call.on == "LLM":
        return member(*_structs(driven, call))
    waiting = {"wait": True} if call.arguments == "wait=True" else {}
    if call.member == "chat":
        return member(**CHAT, **FIELDS, **waiting)
    if call.member == "encode":
        return member(input_ids=PROMPT, **waiting)
    if call.member in ("generate", "async_generate"):
        return _result(member(input_ids=PROMPT, **FIELDS, **waiting, **_turn(call)))
    result = member(*_arguments(driven, call), **KEYWORDS.get(call.member, {}))
    if call.member == "watch":
        result.remove()
    return result


def _with_session(driven: Driven, call: Call) -> Any:
    """The call's session is open when it is to be closed or continued, and closed afterwards."""
    ended = driven.loop.closing
    if not ended and call.member != "open_session":
        driven.engine.open_session(64, str(call))
    try:
        return _plain(driven, call)
    finally:
        if not ended and call.member != "close_session":
            driven.engine.close_session(str(call))


def _turn(call: Call) -> dict[str, Any]:
    return {"session_params": {"id": str(call)}} if call.arguments == "session_params" else {}


def _result(value: Any) -> Any:
    """What a coroutine returns, or an asynchronous generator gives first."""

    if hasattr(value, "__anext__"):
        value = anext(value)
    return asyncio.run(_bounded(value)) if isinstance(value, Awaitable) else value


async def _bounded(value: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(value, WAIT)


def _keywords(call: Call) -> dict[str, Any]:
    return {"mode": call.arguments.strip('"')} if call.member == "pause_scheduler" else {}


def _structs(driven: Driven, call: Call) -> list[Any]:
    """The protocol's struct, or what else a member of the client takes."""
    if call.arguments == "EmbeddingReqInput":
        return [requests.EmbeddingReqInput(input_ids=PROMPT)]
    make: dict[str, Callable[[], Any]] = {
        "generate_request": lambda: requests.GenerateReqInput(input_ids=PROMPT, **FIELDS, **_turn(call)),
        "abort_request": lambda: "nobody",
        "drop_request_state": lambda: "nobody",
        "update_weights_from_tensor": lambda: requests.UpdateWeightsFromTensorReqInput(
            named_tensors=driven.weights
        ),
        "update_weights_from_disk": lambda: requests.UpdateWeightFromDiskReqInput(model_path=driven.path),
        "get_weights_by_name": lambda: requests.GetWeightsByNameReqInput(name=NORM),
        "release_memory_occupation": lambda: requests.ReleaseMemoryOccupationReqInput(tags=call.tags or None),
        "resume_memory_occupation": lambda: requests.ResumeMemoryOccupationReqInput(tags=call.tags or None),
        "open_session": lambda: requests.OpenSessionReqInput(capacity_of_str_len=8, session_id=str(call)),
        "close_session": lambda: requests.CloseSessionReqInput(session_id=str(call)),
        "configure_logging": lambda: requests.ConfigureLoggingReq(log_requests=False),
        "set_internal_state": lambda: requests.SetInternalStateReq(**SETTINGS),
    }
    name = "generate_request" if call.on == "LLM" else call.member
    return [make[name]()] if name in make else []


def _arguments(driven: Driven, call: Call) -> list[Any]:
    """What a verb of the engine takes."""
    make: dict[str, Callable[[], list[Any]]] = {
        "pause": lambda: [call.arguments.strip('"')],
        "paused": lambda: [call.arguments.strip('"')],
        "resident": lambda: list(call.tags),
        "release_memory_occupation": lambda: [list(call.tags) or None],
        "resume_memory_occupation": lambda: [call.tags or None],
        "update_weights_from_tensor": lambda: [driven.weights],
        "update_weights_from_disk": lambda: [driven.path],
        "get_weights_by_name": lambda: [NORM],
        "open_session": lambda: [8, str(call)],
        "close_session": lambda: [str(call)],
        "share_weights": lambda: [driven.module],
        "explain": lambda: [OUTPUT, driven.module],
        "watch": lambda: [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])],
    }
    return make[call.member]() if call.member in make else []


def _with_sender(driven: Driven, call: Call) -> Any:
    """The sender sends, and is told if that is refused."""
    names = list(driven.weights)
    fields: dict[str, Any] = {
        "names": names,
        "dtype_names": ["float32"] * len(names),
        "shapes": [list(tensor.shape) for tensor in driven.weights.values()],
        "group_name": GROUP,
        "timeout": WAIT,
    }
    sending = None
    if not driven.loop.closing:
        driven.join()
        sending = driven.pool.submit(driven.sender.send, driven.weights)
    try:
        return _either(driven, call, requests.UpdateWeightsFromDistributedReqInput, fields)
    finally:
        if sending is not None:
            with suppress(WeightUpdateError):
                sending.result(WAIT)


def _join(driven: Driven, call: Call) -> Any:
    if not driven.loop.closing:
        driven.leave()
    answer = _either(driven, call, requests.InitWeightsUpdateGroupReqInput, driven.group)
    driven.joined = True
    return answer


def _leave(driven: Driven, call: Call) -> Any:
    if not driven.loop.closing:
        driven.join()
    answer = _either(driven, call, requests.DestroyWeightsUpdateGroupReqInput, {"group_name": GROUP})
    driven.joined = False
    return answer


def _record(driven: Driven, call: Call) -> Any:
    """Off before a start, on before a stop, and with something to dump."""
    record = driven.engine.client._core.experts
    record.recording = not call.member.startswith("start")
    record.add(0, np.zeros(1, dtype=np.int64))
    try:
        return _plain(driven, call)
    finally:
        record.recording = False


def _either(driven: Driven, call: Call, kind: Callable[..., Any], fields: dict[str, Any]) -> Any:
    if call.on == "Engine":
        return getattr(driven.engine, call.member)(**fields)
    return _result(getattr(driven.engine.client, call.member)(kind(**fields)))
