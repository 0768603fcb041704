"""Tests that compile kernels: not where Triton was told to interpret them."""

import pytest

from tokenspeed_rl_kernels.registry import INTERPRETED

if INTERPRETED:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Everything is compiled anew, and nothing is left in the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield
