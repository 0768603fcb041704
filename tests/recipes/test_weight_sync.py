"""recipes/weight_sync.py: a trainer's weights reach an engine in another process."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_engine_generates_with_the_trainers_weights() -> None:
    """E9, G2: under torchrun the engine's greedy ids change to transformers' own on the weights sent."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*run, "recipes/weight_sync.py"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    before, after = re.findall(r"^(?:before|after)\s+(\[[\d, ]+\])$", done.stderr, re.M)
    assert before != after and "as the trainer's: True" in done.stderr
