"""`start_profile` and `stop_profile`: Chrome traces of the steps that were asked for, and of nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.step_gate import StepGate
from tests.tiny import Tiny
from tokenspeed_rl import Engine
from tokenspeed_rl.errors import EngineShutdownError, EngineStateError, RequestError

WAIT = 20.0
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 6}
SIX = {2: [3, 4, 5, 6, 7, 8], 9: [10, 11, 12, 13, 14, 15]}
MakeEngine = Callable[..., Engine]


def marks(path: str) -> list[str]:
    """The steps of a trace, in order. Every operator lies within one of them."""
    events = json.loads(Path(path).read_text())["traceEvents"]
    steps = sorted((e for e in events if e.get("cat") == "user_annotation"), key=lambda e: e["ts"])
    ops = [e for e in events if e.get("cat") == "cpu_op"]
    assert any("mm" in e["name"] for e in ops)
    for op in ops:
        assert any(s["ts"] <= op["ts"] <= s["ts"] + s["dur"] and s["tid"] == op["tid"] for s in steps)
    return [step["name"] for step in steps]


def generate(engine: Engine, prompt: list[int] | None = None) -> None:
    prompt = prompt or [2]
    result = engine.generate(input_ids=prompt, sampling_params=GREEDY)
    assert result["output_ids"] == SIX.get(prompt[-1], result["output_ids"])


def profile_state(engine: Engine) -> dict[str, Any]:
    return Tiny.state(engine)["profile"]


def test_from_start_to_stop(counter: Engine, tmp_path: Path) -> None:
    """One trace of all steps in between, each marked with what it computes; none of those around them."""
    generate(counter)
    begun = counter.start_profile(str(tmp_path / "a" / "b"))
    assert begun["output_dir"] == str(tmp_path / "a" / "b") and begun["activities"][0] == "CPU"
    assert begun["start_step"] == Tiny.state(counter)["steps"] and begun["num_steps"] is None
    counter.generate(input_ids=[[1, 2, 3], [7, 8, 9]], sampling_params={**GREEDY, "max_new_tokens": 3})
    assert profile_state(counter)["state"] == "running"
    (path,) = counter.stop_profile()
    generate(counter)
    assert marks(path) == ["prefill[2 requests, 6 tokens]", "decode[2]", "decode[2]"]
    assert [str(each) for each in (tmp_path / "a" / "b").iterdir()] == [path]
    assert path.endswith("-rank0.trace.json") and profile_state(counter)["state"] == "idle"


def test_start_step_and_num_steps(counter: Engine, tmp_path: Path) -> None:
    """It begins when the engine's counter of steps is there, ends by itself, and `stop` has the path then."""
    steps = Tiny.state(counter)["steps"]
    counter.start_profile(str(tmp_path), start_step=steps + 2, num_steps=3)
    assert profile_state(counter)["state"] == "waiting"
    generate(counter, [9])
    state = profile_state(counter)
    assert state["state"] == "ended" and state["steps"] == {"steps": 3}
    assert marks(state["files"][0]) == ["decode[1]"] * 3
    assert counter.stop_profile() == state["files"]
    with pytest.raises(EngineStateError, match="no profile"):
        counter.stop_profile()
    with pytest.raises(RequestError, match=f"taken {steps + 6} steps"):
        counter.start_profile(str(tmp_path), start_step=steps)


def test_by_stage(counter: Engine, tmp_path: Path) -> None:
    """A trace of steps that compute prompts, one of those that don't, `num_steps` of each, from however many
    stretches."""
    counter.flush_cache()
    counter.start_profile(str(tmp_path), num_steps=4, profile_by_stage=True, record_shapes=True)
    for number in range(5):
        counter.generate(input_ids=[number, 2], sampling_params={**GREEDY, "max_new_tokens": 3})
    prefill, decode = counter.stop_profile()
    assert prefill.endswith("-prefill.trace.json") and decode.endswith("-decode.trace.json")
    assert marks(prefill) == ["prefill[1 request, 2 tokens]"] * 4
    assert marks(decode) == ["decode[1]"] * 4
    assert sorted(map(str, tmp_path.iterdir())) == sorted([prefill, decode])
    shapes = [e["args"].get("Input Dims") for e in json.loads(Path(decode).read_text())["traceEvents"][:60]
              if e.get("cat") == "cpu_op"]  # fmt: skip
    assert any(shapes)


def test_with_stack(counter: Engine, tmp_path: Path) -> None:
    """Python's functions are in the trace, those of the step among them; without it none is."""
    found = []
    for stack in (True, None):
        counter.start_profile(str(tmp_path), num_steps=2, with_stack=stack)
        generate(counter)
        (path,) = counter.stop_profile()
        events = json.loads(Path(path).read_text())["traceEvents"]
        found.append([e["name"] for e in events if e.get("cat") == "python_function"])
    assert any("model_runner.py" in name for name in found[0]) and found[1] == []


def test_a_step_with_any_prompt_is_prefill(make_engine: MakeEngine, counting: Any, tmp_path: Path) -> None:
    """Chunked: while one sample decodes, another's prompt comes in pieces."""
    engine = make_engine(counting, chunked_prefill_size=8, page_size=4)
    engine.start_profile(str(tmp_path), with_stack=False)
    engine.generate(input_ids=[[1, 2], list(range(50, 70))], sampling_params=GREEDY)
    (path,) = engine.stop_profile()
    seen = marks(path)
    assert seen[0] == "prefill[2 requests, 8 tokens]"
    assert seen[1:3] == [
        "prefill[1 request, 8 tokens, 1 decoding]",
        "prefill[1 request, 6 tokens, 1 decoding]",
    ]
    assert set(seen[3:]) == {"decode[2]", "decode[1]"}


def test_start_twice_stop_without_start(counter: Engine, tmp_path: Path) -> None:
    """Typed errors, from the client too; the profile that was going on is whole."""
    with pytest.raises(EngineStateError, match="no profile"):
        counter.stop_profile()
    counter.start_profile(str(tmp_path))
    for call in (
        lambda: counter.start_profile(str(tmp_path)),
        lambda: counter.llm.run(counter.client.start_profile(str(tmp_path))),
    ):
        with pytest.raises(EngineStateError, match="going on already"):
            call()
    generate(counter)
    (path,) = counter.llm.run(counter.client.stop_profile())
    assert len(marks(path)) == 6
    counter.start_profile(str(tmp_path))
    assert counter.stop_profile() == [], "no step was taken"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"activities": ["CPU", "TPU"]}, "TPU"),
        ({"activities": []}, "activities"),
        ({"activities": 3}, "activities"),
        ({"num_steps": 0}, "num_steps"),
        ({"start_step": -1}, "start_step"),
        ({"with_stack": "yes"}, "with_stack"),
        ({"record_shapes": 1}, "record_shapes"),
        ({"profile_by_stage": None}, "profile_by_stage"),
        ({"output_dir": "/proc/nowhere"}, "output_dir"),
        ({"output_dir": 3}, "output_dir"),
    ],
    ids=str,
)
def test_bad_arguments_start_nothing(
    counter: Engine, tmp_path: Path, arguments: dict[str, Any], words: str
) -> None:
    """What, got, fix; and no profile is begun."""
    with pytest.raises(RequestError, match=words):
        counter.start_profile(**{"output_dir": str(tmp_path), **arguments})
    assert profile_state(counter)["state"] == "idle" and list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to record")
@pytest.mark.parametrize("name", ["GPU", "CUDA"])
def test_a_device_that_is_not_here(counter: Engine, tmp_path: Path, name: str) -> None:
    """Asked for by either name, it is refused; nobody is given a trace without it."""
    with pytest.raises(RequestError, match=f"recorded here.*{name}"):
        counter.start_profile(str(tmp_path), activities=["CPU", name])


def test_no_folder_is_one_in_the_working_directory(
    counter: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`profiles`, as documented."""
    monkeypatch.chdir(tmp_path)
    counter.start_profile(num_steps=1)
    generate(counter)
    (path,) = counter.stop_profile()
    assert Path(path).parent == tmp_path / "profiles"


def test_the_trainers_profiler_goes_on(counter: Engine, tmp_path: Path) -> None:
    """Torch has one profiler per process. Beside another's the engine starts none, at once or at its first
    step, and leaves that one whole."""
    counter.start_profile(str(tmp_path))
    with profile(activities=[ProfilerActivity.CPU]) as trainers:
        torch.ones(3).add(1)
        generate(counter)
        with pytest.raises(EngineStateError, match="another profiler"):
            counter.stop_profile()
        with pytest.raises(EngineStateError, match="another profiler"):
            counter.start_profile(str(tmp_path))
        torch.ones(3).mul(2)
    assert {"aten::add", "aten::mul"} <= {event.key for event in trainers.key_averages()}
    counter.start_profile(str(tmp_path))
    generate(counter)
    assert len(marks(*counter.stop_profile())) == 6


def test_across_pause_release_update_and_wake(make_engine: MakeEngine, counting: Any, tmp_path: Path) -> None:
    """A profile sees the steps on either side; inside an update's iterator it can be stopped and started."""
    counting.save_pretrained(tmp_path / "model")
    engine = make_engine(str(tmp_path / "model"))
    engine.start_profile(str(tmp_path / "traces"))
    generate(engine)
    with engine.paused("retract"):
        engine.release_memory_occupation()
        engine.resume_memory_occupation("weights")
        paths = []

        def weights() -> Any:
            paths.extend(engine.stop_profile())
            engine.start_profile(str(tmp_path / "traces"))
            yield from counting.named_parameters()

        engine.update_weights_from_tensor(weights())
        engine.resume_memory_occupation()
    generate(engine)
    paths += engine.stop_profile()
    assert [len(marks(path)) for path in paths] == [6, 6]


def test_shutdown_during_a_profile_writes_it(
    make_engine: MakeEngine,
    counting: Any,
    tmp_path: Path,
    pool: ThreadPoolExecutor,
    step_gate: type[StepGate],
) -> None:
    """No hang, the trace of what was recorded is there, and the process's profiler is free again."""
    engine = make_engine(counting)
    engine.start_profile(str(tmp_path))
    with step_gate(engine) as gate:
        running = pool.submit(engine.generate, input_ids=[2], sampling_params=GREEDY)
        gate.step(2)
        gate.wait()
        ending = pool.submit(engine.shutdown)
        with pytest.raises(EngineShutdownError):
            running.result(WAIT)
        gate.open()
        ending.result(WAIT)
    (path,) = tmp_path.iterdir()
    assert marks(str(path))[:2] == ["prefill[1 request, 1 token]", "decode[1]"]
    with profile(activities=[ProfilerActivity.CPU]):
        torch.ones(3)


def test_a_loop_that_fails_in_a_profile_leaves_the_profiler_free(
    make_engine: MakeEngine, counting: Any, tmp_path: Path
) -> None:
    """The engine is dead; the trainer can profile."""
    engine = make_engine(counting)
    engine.start_profile(str(tmp_path))
    generate(engine)
    loop: Any = engine.client._core.loop
    loop.runner.run = None
    with pytest.raises(Exception, match="loop failed"):
        generate(engine)
    engine.shutdown()
    with profile(activities=[ProfilerActivity.CPU]):
        torch.ones(3)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_goes_away(counter: Engine, tmp_path: Path) -> None:
    """The trace can't be written: `stop` says so, and the engine and the next profile are fine."""
    folder = tmp_path / "gone"
    counter.start_profile(str(folder))
    folder.rmdir()
    generate(counter)
    with pytest.raises(EngineStateError, match="the profile failed"):
        counter.stop_profile()
    counter.start_profile(str(tmp_path), num_steps=1)
    generate(counter)
    assert len(marks(*counter.stop_profile())) == 1


@pytest.mark.parametrize("by_stage", [False, True])
def test_a_full_disk(
    counter: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_stage: bool
) -> None:
    """`stop` says that nothing could be written, and no half file is left."""

    def cut_short(self: Any, path: str) -> None:  # as torch does: a message on stderr, and no error
        Path(path + ".tmp").write_text("{")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", cut_short)
    counter.start_profile(str(tmp_path), profile_by_stage=by_stage)
    generate(counter)
    with pytest.raises(EngineStateError, match="disk may be full"):
        counter.stop_profile()
    assert list(tmp_path.iterdir()) == []
