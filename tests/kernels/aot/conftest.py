"""Tests that compile kernels: not where Triton was told to interpret them."""

from tokenspeed_rl_kernels.registry import INTERPRETED

if INTERPRETED:
    collect_ignore_glob = ["test_*.py"]
