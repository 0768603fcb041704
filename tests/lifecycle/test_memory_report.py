"""What the engine says it holds is what it holds; and memory of the host really goes back to the system."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lifecycle.guarded import exact, looks, rig, version, weights_of
from tests.lifecycle.rollouts import EXACT
from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.memory import TAGS, HostMemory

W0 = Tiny.model()
PATIENCE = 100.0
TOLERANCE = 3 << 20


def anonymous() -> int:
    """Bytes of anonymous memory that this process has now."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"RssAnon:\s+(\d+) kB", status)[0]) * 1024


def test_per_tag(make_engine: Any, monkeypatch: Any) -> None:
    """A7: per tag the report equals the backend's counters and what the shapes say, in every state; what lies
    outside of the tags is the table of rotary angles."""
    made = rig(make_engine, monkeypatch, W0, weights_backup="cpu", max_total_tokens=512)
    engine, vmm = made.engine, made.vmm
    config = W0.config
    weights = sum(tensor.nbytes for tensor in weights_of(W0).values())
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4 * 512
    gaps = 256 * (len(weights_of(W0)) + 1) + vmm.unit

    def check(mapped: dict[str, int], host: int) -> None:
        report, usage = engine.memory_report(), vmm.usage()
        assert set(report) == {*TAGS, "untagged"}
        for tag in TAGS:
            assert report[tag] == {**usage[tag]._asdict(), "owner": "engine"}
        assert (
            mapped["weights"]
            <= report["weights"]["mapped"]
            <= mapped["weights"] + gaps * bool(mapped["weights"])
        )
        assert report["kv_cache"]["mapped"] == mapped["kv_cache"]
        assert weights <= report["weights"]["virtual"] <= weights + gaps
        assert report["kv_cache"]["virtual"] == kv
        assert host <= report["weights"]["host"] <= host + gaps * bool(host)
        assert report["kv_cache"]["host"] == report["cuda_graph"]["host"] == 0
        assert report["cuda_graph"]["mapped"] == report["cuda_graph"]["virtual"] == 0
        assert report["untagged"] <= config.max_position_embeddings * config.head_dim * 4

    check({"weights": weights, "kv_cache": 0}, 0)
    exact(W0, engine)
    awake = {"weights": weights, "kv_cache": kv}
    check(awake, 0)
    assert engine.memory_report()["untagged"] == config.max_position_embeddings * config.head_dim * 4
    engine.release_memory_occupation("weights")
    check({**awake, "weights": 0}, weights)
    engine.release_memory_occupation("kv_cache")
    check({"weights": 0, "kv_cache": 0}, weights)
    engine.resume_memory_occupation("weights")
    check({**awake, "kv_cache": 0}, 0)
    engine.resume_memory_occupation()
    check(awake, 0)
    engine.shutdown()
    gc.collect()
    assert all(usage == (0, 0, 0) for usage in vmm.usage().values())


def test_shared_weights_are_the_trainers(make_engine: Any, monkeypatch: Any) -> None:
    """A7, E13: of shared weights the engine holds nothing; the report names the owner, and sharing gives back
    what the engine had of its own, also in its sleep, with the backup."""
    model = Tiny.model(seed=1)
    for asleep in (False, True):
        made = rig(make_engine, monkeypatch, W0, weights_backup="cpu")
        engine = made.engine
        exact(W0, engine)
        assert engine.memory_report()["weights"]["owner"] == "engine"
        if asleep:
            engine.release_memory_occupation()
        engine.share_weights(model)
        nothing = {"mapped": 0, "virtual": 0, "host": 0, "owner": "trainer"}
        assert engine.memory_report()["weights"] == nothing
        assert engine.memory_report()["kv_cache"]["owner"] == "engine"
        if asleep:
            engine.resume_memory_occupation()
        assert exact(model, engine, cached=0) < EXACT
        engine.release_memory_occupation()
        assert engine.memory_report()["weights"] == nothing and made.vmm.ledger.mapped == 0
        assert version(engine)[2] == "valid"
        engine.resume_memory_occupation()
        assert exact(model, engine, cached=0) < EXACT


def test_a_view_outlives_its_region(make_engine: Any, monkeypatch: Any) -> None:
    """A7: memory that somebody still holds a tensor of is reported until that is gone, and never touched by
    anybody else: sharing, or the end of the engine, pulls nothing away."""
    made = rig(make_engine, monkeypatch, W0)
    engine = made.engine
    views = dict(engine.named_parameters())
    engine.share_weights(Tiny.model(seed=1))
    gc.collect()
    assert engine.memory_report()["weights"]["mapped"] > 0
    assert all(tensor.equal(weights_of(W0)[name]) for name, tensor in views.items())
    views.clear()
    gc.collect()
    assert engine.memory_report()["weights"]["mapped"] == 0


@pytest.mark.parametrize("backup", ["none", "cpu"])
def test_fifty_cycles(make_engine: Any, backup: str) -> None:
    """A6: on the system's own memory, fifty times: mapped bytes constant, greedy ids identical, the process's
    anonymous memory flat awake, and lower asleep by what the report says."""
    model = Tiny.model(hidden_size=128, intermediate_size=1024, vocab_size=4096, num_attention_heads=4)
    engine = make_engine(model.config, max_total_tokens=1 << 14, weights_backup=backup)
    assert isinstance(engine.client._core.source.memory, HostMemory)
    engine.update_weights_from_tensor(weights_of(model))
    before, report = looks(engine), engine.memory_report()
    mapped = sum(report[tag]["mapped"] for tag in TAGS)
    assert report["weights"]["mapped"] > 6 << 20
    held: list[int] = []
    for cycle in range(50):
        awake = anonymous() if cycle % 10 == 9 else 0
        engine.release_memory_occupation()
        asleep = engine.memory_report()
        assert sum(asleep[tag]["mapped"] for tag in TAGS) == 0
        saved = asleep["weights"]["host"]
        assert saved == (report["weights"]["mapped"] if backup == "cpu" else 0)
        if awake and backup == "none":  # of KV, only what was written had memory
            fell = awake - anonymous()
            assert report["weights"]["mapped"] - TOLERANCE < fell < mapped + TOLERANCE
        engine.resume_memory_occupation()
        if backup == "none":
            engine.update_weights_from_tensor(weights_of(model))
        if cycle % 10 == 9:
            assert looks(engine) == before and engine.memory_report() == report
            held.append(anonymous())
    assert max(held[1:]) - held[1] < TOLERANCE


SCRIPT = """
import json, os, re
import torch
from pathlib import Path
from torch.utils.data import DataLoader
from transformers import LlamaConfig
from tokenspeed_rl import Engine

CONFIG = LlamaConfig(
    vocab_size=8192, hidden_size=256, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=256, eos_token_id=None, bos_token_id=None,
)
ASK = {"input_ids": list(range(40)), "sampling_params": {"max_new_tokens": 8, "temperature": 0}}

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.full((1000,), index)

def anonymous():
    return int(re.findall(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024

def ask_in_a_child(engine):
    child = os.fork()
    if child == 0:
        try:
            engine.generate(**ASK)
        except Exception as error:
            os._exit(7 if "forked" in str(error) else 1)
        os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def cycle(engine, backed_up):
    first = engine.generate(**ASK)["output_ids"]
    loader = DataLoader(
        Numbers(), batch_size=2, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
    )
    rows = iter(loader)
    found = {"first batch": next(rows).float().mean().item(), "same": []}
    found["same"].append(engine.generate(**ASK)["output_ids"] == first)
    report, awake = engine.memory_report(), anonymous()
    engine.release_memory_occupation()  # the workers live, and keep none of it
    found |= {"fell": awake - anonymous(), "mapped": report["weights"]["mapped"]}
    found["saved"] = engine.memory_report()["weights"]["host"]
    list(rows)
    engine.resume_memory_occupation()
    if backed_up:
        found["same"].append(engine.generate(**ASK)["output_ids"] == first)
    del rows, loader  # the workers exit
    found["forked child"] = ask_in_a_child(engine)
    if backed_up:
        found["same"].append(engine.generate(**ASK)["output_ids"] == first)
    engine.release_memory_occupation()
    return found

torch.set_num_threads(1)
engines = {name: Engine(CONFIG, max_total_tokens=4096, weights_backup=name) for name in ("none", "cpu")}
print(json.dumps({name: cycle(engine, name == "cpu") for name, engine in engines.items()}))
"""


@pytest.fixture(scope="module")
def process() -> subprocess.CompletedProcess[str]:
    """A process that forks workers while its engines sleep and wake, and ends while they are asleep."""
    command = [sys.executable, "-c", SCRIPT]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


@pytest.mark.parametrize("backup", ["none", "cpu"])
def test_forked_workers(process: subprocess.CompletedProcess[str], backup: str) -> None:
    """A8: DataLoader workers forked while the engine lives keep none of its memory from going back, and
    change no output, alive or ended."""
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)[backup]
    assert found["first batch"] == 0.5 and found["forked child"] == 7
    assert found["same"] == [True] * (3 if backup == "cpu" else 1)
    assert found["saved"] == (found["mapped"] if backup == "cpu" else 0)
    assert found["fell"] > found["mapped"] - found["saved"] - TOLERANCE


def test_the_interpreter_ends_while_it_sleeps(process: subprocess.CompletedProcess[str]) -> None:
    """A9: without a shutdown, asleep: exit code 0 and not a word."""
    assert process.returncode == 0 and process.stderr == ""


def test_the_report_is_for_any_thread(make_engine: Any, pool: Any) -> None:
    """Contract 5: reports and states are answered while the loop is busy."""
    engine: Engine = make_engine(W0.config)
    with Tiny.held(engine):
        report = pool.submit(engine.memory_report).result(1)
        assert report["weights"]["mapped"] > 0
        assert pool.submit(engine.is_sleeping).result(1) is False
        assert pool.submit(engine.get_internal_state).result(1)
