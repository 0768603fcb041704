"""What `open_session` and `close_session` of the protocol do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.protocol.conftest import MakeClient, only
from tests.tiny import Tiny
from tokenspeed_rl import Engine, EngineClient
from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.requests import CloseSessionReqInput, GenerateReqInput, OpenSessionReqInput

OPEN = OpenSessionReqInput(capacity_of_str_len=20, session_id="s")


async def answer(client: EngineClient, prompt: list[int], session: str) -> Any:
    """The result of one turn."""
    params = {"temperature": 0, "max_new_tokens": 2}
    obj = GenerateReqInput(input_ids=prompt, sampling_params=params, session_params={"id": session})
    return await only(client.generate_request(obj))


async def state(client: EngineClient) -> dict[Any, Any]:
    return (await client.get_internal_state())[0]


async def test_open_and_close(make_client: MakeClient) -> None:
    """Contract 2, 3, 7: the id that was asked for, or a random one, comes back; turns continue that session;
    closed, its tokens are gone and the id is free."""
    client = make_client(Tiny.successor())
    other = await client.open_session(OpenSessionReqInput(capacity_of_str_len=20))
    assert await client.open_session(OPEN) == "s" and other and other != "s"
    turns = [await answer(client, [5], "s") for _ in range(2)]
    assert [turn["meta_info"]["prompt_ids"] for turn in turns] == [[5], [5, 6, 7, 5]]
    assert (await answer(client, [9], other))["output_ids"] == [10, 11]
    assert (await state(client))["sessions"] == {"count": 2, "tokens": 9, "live": 0}
    for name in ("s", other):
        await client.close_session(CloseSessionReqInput(session_id=name))
    assert (await state(client))["sessions"] == {"count": 0, "tokens": 0, "live": 0}
    with pytest.raises(RequestError, match="no session"):
        await answer(client, [5], "s")
    assert await client.open_session(OPEN) == "s"
    assert (await answer(client, [5], "s"))["meta_info"]["prompt_tokens"] == 1


async def test_refusals(make_client: MakeClient) -> None:
    """Contract 2: a session that is open is answered with None, and why is `last_refusal`; a malformed call,
    and closing what isn't open, raise. The session that was there stays as it was."""
    client = make_client(Tiny.successor())
    assert await client.open_session(OPEN) == "s"
    await answer(client, [5], "s")
    assert await client.open_session(OPEN) is None
    refusal = (await state(client))["last_refusal"]
    assert "open already" in refusal and "'s'" in refusal
    with pytest.raises(RequestError, match="capacity_of_str_len"):
        await client.open_session(OpenSessionReqInput(capacity_of_str_len=0))
    with pytest.raises(RequestError, match="OpenSessionReqInput"):
        await client.open_session(20)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="no session"):
        await client.close_session(CloseSessionReqInput(session_id="never"))
    with pytest.raises(RequestError, match="CloseSessionReqInput"):
        await client.close_session("s")  # type: ignore[arg-type]
    assert (await state(client))["sessions"] == {"count": 1, "tokens": 3, "live": 0}


def test_the_blocking_engine_raises_the_same_refusal(counter: Engine) -> None:
    """Contract 2: `Engine.open_session` raises where the client answers None."""
    assert counter.open_session(20, session_id="s") == "s"
    with pytest.raises(RequestError, match="open already") as caught:
        counter.open_session(20, "s")
    assert caught.value.got == "'s'" and caught.value.fix
    counter.close_session("s")
    with pytest.raises(RequestError, match="no session"):
        counter.close_session("s")
