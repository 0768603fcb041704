"""An engine in a process of its own: interrupts, exits, forks and launchers leave no trace and no wedge."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

PATIENCE = 90.0
MAKE = """
import asyncio, os, signal, sys, threading
from transformers import LlamaConfig
from tokenspeed_rl import AsyncLLM, Engine
from tokenspeed_rl.errors import *
from tokenspeed_rl.requests import GenerateReqInput

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=4096, eos_token_id=None, bos_token_id=None,
)
LONG = {"max_new_tokens": 4000}
SHORT = {"max_new_tokens": 3, "seed": 1}

def make():
    return Engine(CONFIG, max_total_tokens=8192)
"""
INTERRUPT = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits it ignored
engine = make()
runner = engine.client._core.loop.runner
run, steps = runner.run, 0

def interrupt_after_three(plan):
    global steps
    outcome = run(plan)
    steps += 1
    if steps == 3:
        os.kill(os.getpid(), signal.SIGINT)
    return outcome

runner.run = interrupt_after_three
expected = None
for name in ("generate", "generate with a bar", "stream", "asyncio.run", "run"):
    steps = 0
    try:
        if name == "generate":
            engine.generate(input_ids=[1], rid="r", sampling_params=LONG)
        elif name == "generate with a bar":
            engine.generate(input_ids=[1], rid="r", sampling_params={**LONG, "n": 2}, use_tqdm=True)
        elif name == "stream":
            for _ in engine.generate(input_ids=[1], rid="r", sampling_params=LONG, stream=True):
                pass
        elif name == "asyncio.run":
            asyncio.run(engine.async_generate(input_ids=[1], rid="r", sampling_params=LONG))
        else:
            engine.llm.run(engine.async_generate(input_ids=[[1], [2]], rid=["r", "s"], sampling_params=LONG))
    except KeyboardInterrupt:
        pass
    else:
        sys.exit(name + " was not interrupted")
    steps = -10**9
    result = engine.generate(input_ids=[1], rid="r", sampling_params=SHORT)
    expected = expected or result["output_ids"]
    assert result["output_ids"] == expected, name
    engine.flush_cache(), engine.flush_cache()
    state = engine.get_internal_state()[0]
    assert state["num_running"] == state["num_waiting"] == engine.get_load()[0].num_reqs == 0, name
    assert state["pages"]["free"] == state["pages"]["total"], name
print("alive")
"""
EXIT = {
    "live stream": """
engine = make()
stream = engine.generate(input_ids=[1], sampling_params=LONG, stream=True)
next(stream)
""",
    "live async stream in a global": """
engine = make()
stream = engine.client.generate_request(GenerateReqInput(input_ids=[1], sampling_params=LONG, stream=True))
""",
    "several engines and a cycle": """
engines = [make(), make(), AsyncLLM(CONFIG, max_total_tokens=256)]
engines[0].others = engines
engines[0].generate(input_ids=[1], sampling_params=SHORT)
""",
    "sys.exit inside with": """
with make() as engine:
    stream = engine.generate(input_ids=[1], sampling_params=LONG, stream=True)
    next(stream)
    sys.exit(0)
""",
}
FORK = """
from torch.utils.data import DataLoader

engine = make()
before = engine.generate(input_ids=[1, 2, 3], sampling_params=SHORT)["output_ids"]
stream = engine.generate(input_ids=[9], sampling_params=LONG, stream=True)
next(stream)
waiting = engine.client.generate_request(GenerateReqInput(input_ids=[1], sampling_params=LONG, stream=True))
loader = DataLoader(range(8), num_workers=2, multiprocessing_context="fork")
assert sorted(int(x) for x in loader) == list(range(8))

def outcome(child):
    pid = os.fork()
    if pid == 0:
        child()
        sys.exit(0)  # runs the exit handlers that the parent registered
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def use():
    for call in (
        lambda: engine.generate(input_ids=[1]),
        lambda: engine.generate(input_ids=[1], stream=True),
        lambda: asyncio.run(engine.async_generate(input_ids=[1])),
        lambda: asyncio.run(anext(waiting)),
        engine.get_load,
        engine.flush_cache,
    ):
        try:
            call()
        except EngineStateError as error:
            assert "forked" in str(error)
        else:
            os._exit(3)
    engine.abort()
    engine.shutdown()

def drop():
    global engine, stream, waiting
    del engine, stream, waiting
    import gc
    gc.collect()

for child in (use, drop):
    assert outcome(child) == 0
next(stream)
stream.close()
assert engine.generate(input_ids=[1, 2, 3], sampling_params=SHORT)["output_ids"] == before
print("alive")
"""
TORCHRUN = """
import logging
import torch

def process():
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1]
    root = logging.getLogger()
    return ([signal.getsignal(number) for number in numbers], dict(os.environ), os.getcwd(), root.level,
            list(root.handlers), asyncio.get_event_loop_policy(), torch.distributed.is_initialized(),
            threading.active_count(), sys.excepthook, threading.excepthook)

before = process()
async def inside():
    engine = make()
    blocking = engine.generate(input_ids=[1], sampling_params=SHORT)
    awaited = await engine.async_generate(input_ids=[1], sampling_params=SHORT)
    assert blocking["output_ids"] == awaited["output_ids"]
    return engine
engine = asyncio.run(inside())
made = []
thread = threading.Thread(target=lambda: made.append(make()))
thread.start(); thread.join()
ids = [e.generate(input_ids=[1], sampling_params=SHORT)["output_ids"] for e in (engine, *made)]
assert ids[0] == ids[1]
with open(f"/proc/self/task/{os.getpid()}/children") as children:
    assert children.read() == "", "it started a process"
engine.shutdown(); made[0].shutdown()
assert process() == before
print("alive")
"""


def python(program: str, **environment: str) -> str:
    """Standard output of `program`, which must end by itself with exit code 0 and an empty standard error."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", MAKE + program],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    noise = [line for line in done.stderr.splitlines() if line and "sample" not in line]  # but for the bar
    assert (done.returncode, noise) == (0, []), done.stderr
    return done.stdout


def test_ctrl_c() -> None:
    """G7: a real SIGINT in the middle of each kind of call raises KeyboardInterrupt there, aborts its
    requests, returns their pages and leaves a living engine."""
    assert python(INTERRUPT) == "alive\n"


@pytest.mark.parametrize("name", EXIT)
def test_exit_without_shutdown(name: str) -> None:
    """G8: a program that ends without shutdown, with live requests too, exits with code 0 and no trace."""
    python(EXIT[name])


def test_forked_children() -> None:
    """G9, A8 without memory release: DataLoader workers and plain forks end cleanly while the engine lives,
    use of it in a child is refused instead of hanging, and the parent notices nothing."""
    assert python(FORK) == "alive\n"


def test_as_a_rank_of_a_launcher() -> None:
    """G1: under a launcher's variables, in a coroutine and in a thread, an engine is made and used; signal
    handlers, environment, threads, children and the default process group stay as they were."""
    launcher = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none"}
    assert python(TORCHRUN, **launcher, **rendezvous) == "alive\n"


def test_construction_under_pytest(tiny: Any, make_engine: Any) -> None:
    """G1: under pytest, whose log and signal handlers stay in place."""
    handlers = list(logging.getLogger().handlers), signal.getsignal(signal.SIGINT)
    make_engine(tiny.model()).generate(input_ids=[1], sampling_params={"max_new_tokens": 1})
    assert (list(logging.getLogger().handlers), signal.getsignal(signal.SIGINT)) == handlers
