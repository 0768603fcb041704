"""A client as trainer code sees it: typed by the protocol, and nothing else used of it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.tiny import Tiny
from tokenspeed_rl import AsyncLLM, EngineClient

MakeClient = Callable[..., EngineClient]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests that are coroutines run on an event loop of their own, for a minute at most."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in wanted}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), 60))
    return True


@pytest.fixture
def make_client() -> Any:
    """`AsyncLLM(model, **options)` on the CPU, by default of `Tiny.model()`; all are shut down after the
    test."""
    made: list[AsyncLLM] = []

    def make(model: Any = None, **options: Any) -> EngineClient:
        chosen = Tiny.model() if model is None else model
        made.append(AsyncLLM(chosen, **{"device": "cpu", "max_total_tokens": 1024, **options}))
        return made[-1]

    yield make
    for client in made:
        client.shutdown()


async def only(results: AsyncIterator[Any]) -> Any:
    """The one result of a request that does not stream."""
    (result,) = [result async for result in results]
    return result
