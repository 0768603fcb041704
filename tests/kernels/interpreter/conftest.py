"""Tests of Triton kernels by its interpreter: collected where ``TRITON_INTERPRET=1`` was set at the start."""

import pytest
import torch

from tokenspeed_rl_kernels.registry import INTERPRETED

if not INTERPRETED:
    collect_ignore_glob = ["test_*.py"]

DTYPES = [torch.float32, torch.float16]
"""What the interpreter computes rightly; bfloat16 it does not."""


@pytest.fixture(params=DTYPES, ids=["fp32", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """A dtype of inputs."""
    found: torch.dtype = request.param
    return found
