"""What this version lacks is refused by name, with its reason, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tokenspeed_rl import Engine, requests
from tokenspeed_rl.errors import (
    EngineStateError,
    UnavailableError,
)

GREEDY = {"temperature": 0, "max_new_tokens": 4}


def generate(**arguments: Any) -> Callable[[Engine], Any]:
    return lambda engine: engine.generate(**arguments)


LATER: dict[str, Callable[[Engine], Any]] = {
    "set_internal_state": lambda e: e.set_internal_state(server_args={"max_running_requests": 2}),
    "configure_logging": lambda e: e.client.configure_logging(
        requests.ConfigureLoggingReq(log_requests=True)
    ),
    "start_profile": lambda e: e.start_profile(),
    "stop_profile": lambda e: e.stop_profile(),
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
    """Contract 2: a bool's reason is `last_refusal`."""
    client, run = counter.client, counter.llm.run
    assert run(client.set_internal_state(requests.SetInternalStateReq(weight_version="x"))) == [False]
    assert "set_internal_state" in counter.get_internal_state()[0]["last_refusal"]
