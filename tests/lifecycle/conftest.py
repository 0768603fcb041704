"""What several files of this folder start from."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tiny import Tiny
from tokenspeed_rl import Engine


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """Weights by label; nobody writes them."""
    return {f"W{seed}": Tiny.model(seed=seed) for seed in range(2)}


@pytest.fixture
def one(make_engine: Any, counting: Any) -> Engine:
    """An engine that runs one request at a time; token t is followed by t + 1."""
    engine: Engine = make_engine(counting, max_running_requests=1, page_size=4)
    return engine
