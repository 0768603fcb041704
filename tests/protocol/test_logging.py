"""`configure_logging`: request logs at three levels, and dumps that never hurt a request."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import Tiny
from tokenspeed_rl import Engine, EngineConfig, requests
from tokenspeed_rl.core.watching import request_log
from tokenspeed_rl.core.watching.dump_files import DumpFiles
from tokenspeed_rl.core.watching.request_log import RequestLog
from tokenspeed_rl.errors import ConfigError, EngineShutdownError, RequestError

WAIT = 20.0
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 4}
PARAMS: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "max_new_tokens": 4}
MakeEngine = Callable[..., Engine]


def flushed(engine: Engine) -> None:
    """Everything that ended so far has been written."""
    assert engine.client._core.watch._requests.settle(WAIT), "it was not"


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(folder.iterdir()) for line in file.read_text().splitlines()]


@pytest.fixture
def engine(make_engine: MakeEngine, counting: Any) -> Engine:
    return make_engine(counting, tokenizer=Tiny.tokenizer())


# Logs


@pytest.mark.parametrize("level", [0, 1, 2])
def test_three_levels(engine: Engine, caplog: pytest.LogCaptureFixture, level: int) -> None:
    """0: ids and counts; 1: also what was sampled with; 2: also prompt and output. Each sample a line, at
    info, though `log_level` is "warning", and none through the root logger itself."""
    engine.generate("unseen", GREEDY, rid="before")
    engine.configure_logging(log_requests=True, log_requests_level=level)
    engine.generate("secret", {**PARAMS, "n": 2}, rid="mine")
    engine.configure_logging(log_requests=False)
    engine.generate("unseen", GREEDY, rid="after")
    engine.shutdown()
    records = [record for record in caplog.records if record.name == "tokenspeed_rl.requests"]
    assert [record.levelno for record in records] == [logging.INFO] * 2
    for index, record in enumerate(records):
        text = record.getMessage()
        cached = 6 * index
        assert f"request 'mine'[{index}]: 6 prompt tokens, {cached} of them cached, 4 output tokens" in text
        assert "length" in text
        assert ("top_k=3" in text and "temperature=0.5" in text) is (level >= 1)
        assert ("secret" in text) is (level >= 2)
    assert not any("before" in text or "after" in text for text in caplog.messages)


def test_a_log_line_stays_one_line_and_short(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Prompts of any length, with any characters."""
    engine.configure_logging(log_requests=True, log_requests_level=2)
    engine.generate("a\nb\r\x1b[31m" * 20, GREEDY, rid="x\ny")
    engine.shutdown()
    (text,) = [record.getMessage() for record in caplog.records if record.name == "tokenspeed_rl.requests"]
    assert text.isprintable() and len(text) < 1000


def test_none_leaves_as_is(engine: Engine, tmp_path: Path) -> None:
    """Each field by itself; the settings show it."""
    asked: dict[str, Any] = {
        "log_requests": True,
        "log_requests_level": 2,
        "dump_requests_folder": str(tmp_path),
        "dump_requests_threshold": 7,
    }
    for name, value in asked.items():
        engine.client.configure_logging(requests.ConfigureLoggingReq(**{name: value}))
    shown = Tiny.state(engine)["server_args"]
    assert {name: shown[name] for name in asked} == asked
    engine.client.configure_logging(requests.ConfigureLoggingReq())
    assert Tiny.state(engine)["server_args"] == shown


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"log_requests_level": 3}, ConfigError),
        ({"log_requests": "yes"}, ConfigError),
        ({"dump_requests_threshold": 0}, ConfigError),
        ({"dump_requests_folder": "/proc/nowhere"}, RequestError),
        ({"dump_request_folder": "x"}, RequestError),
    ],
    ids=str,
)
def test_what_is_refused_changes_nothing(engine: Engine, fields: dict[str, Any], error: Any) -> None:
    """Nothing of the same call either."""
    before = Tiny.state(engine)["server_args"]
    with pytest.raises(error):
        engine.configure_logging(**{"log_requests": True, **fields})
    assert Tiny.state(engine)["server_args"] == before
    wrong: Any = {"log_requests": True}
    with pytest.raises(RequestError, match="ConfigureLoggingReq"):
        engine.client.configure_logging(wrong)
    engine.shutdown()
    with pytest.raises(EngineShutdownError):
        engine.configure_logging(log_requests=True)


def test_who_sees_it_is_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any handler an info line goes nowhere: the engine says so at warning, which Python then
    prints."""
    seen: list[str] = []
    ours = engine.client._core.log
    monkeypatch.setattr(ours, "handle", lambda record: seen.append(record.getMessage()))
    for logger in (logging.getLogger(), logging.getLogger("tokenspeed_rl")):
        monkeypatch.setattr(logger, "handlers", [])
    engine.configure_logging(log_requests=True)
    assert len(seen) == 1 and "basicConfig" in seen[0]


def test_a_handler_that_fails_or_hangs_holds_nobody_up(engine: Engine) -> None:
    """Lines are written by another thread; what a handler raises is its own affair."""
    go_on, stuck = threading.Event(), threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            stuck.set()
            assert go_on.wait(WAIT)
            raise RuntimeError("a handler of the user's")

    logger, handler = logging.getLogger("tokenspeed_rl"), Handler()
    logger.addHandler(handler)
    try:
        engine.configure_logging(log_requests=True)
        for _ in range(3):
            assert engine.generate(input_ids=[1], sampling_params=GREEDY)["output_ids"] == [2, 3, 4, 5]
            assert stuck.wait(WAIT)
        go_on.set()
        engine.shutdown()
    finally:
        go_on.set()
        logger.removeHandler(handler)


# Dumps


def test_a_dump_has_everything(engine: Engine, tmp_path: Path) -> None:
    """Inputs, parameters, the seed drawn with, versions, outputs, logprobs and the reason to end, as the
    caller got them; files of so many samples, which only their owner may read."""
    folder = tmp_path / "dumps"
    engine.configure_logging(dump_requests_folder=str(folder), dump_requests_threshold=2)
    fields: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0, "return_sampling_mask": True}
    results = engine.generate(["ab", "cd"], {**PARAMS, "n": 2, "seed": 3}, **fields)
    results.append(engine.generate(input_ids=[9], sampling_params=GREEDY))
    engine.set_internal_state(weight_version="other")
    results.append(engine.generate(input_ids=[9], sampling_params={**GREEDY, "stop_token_ids": [11]}))
    engine.shutdown()
    files = sorted(folder.iterdir())
    assert [len(file.read_text().splitlines()) for file in files] == [2, 2, 2]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    dumped = lines_of(folder)
    by_place = {(line["meta_info"]["id"], line["index"]): line for line in dumped}
    for result in results:
        line = by_place[result["meta_info"]["id"], result["meta_info"]["index"]]
        plain = json.loads(json.dumps(result))
        assert {name: line[name] for name in plain} == plain
    first = by_place[results[0]["meta_info"]["id"], 0]
    assert first["input_ids"] == list(b"ab") and first["sampling_params"]["seed"] == 3
    assert first["sampling_params"]["top_k"] == 3 and first["seed"] == 3, "its own, at index 0"
    assert by_place[results[0]["meta_info"]["id"], 1]["seed"] != 3
    assert [line["meta_info"]["weight_version"] for line in dumped[-2:]] == ["default", "other"]
    assert dumped[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": 11}


def test_a_dump_can_be_ended_and_begun_elsewhere(engine: Engine, tmp_path: Path) -> None:
    """ "" ends it; another folder has what ends from then on."""
    for name in ("a", "", "b"):
        engine.configure_logging(dump_requests_folder=name and str(tmp_path / name))
        engine.generate(input_ids=[5], sampling_params=GREEDY, rid=f"in {name}")
    engine.shutdown()
    assert [line["rid"] for line in lines_of(tmp_path / "a")] == ["in a"]
    assert [line["rid"] for line in lines_of(tmp_path / "b")] == ["in b"]


def test_from_the_construction_on(make_engine: MakeEngine, counting: Any, tmp_path: Path) -> None:
    """The same settings as `EngineConfig` fields; a folder that can't be written builds no engine."""
    engine = make_engine(counting, dump_requests_folder=str(tmp_path))
    engine.generate(input_ids=[5], sampling_params=GREEDY)
    engine.shutdown()
    assert len(lines_of(tmp_path)) == 1
    with pytest.raises(ConfigError, match="dump_requests_folder"):
        make_engine(counting, dump_requests_folder="/proc/nowhere")


def test_the_same_folder_again_after_a_failure(engine: Engine, tmp_path: Path) -> None:
    """Turned on again once there is room, it goes on."""
    engine.configure_logging(dump_requests_folder=str(tmp_path / "dumps"))
    engine.generate(input_ids=[5], sampling_params=GREEDY)
    flushed(engine)
    engine.client._core.watch._requests._wanted.files._file.close()
    engine.generate(input_ids=[5], sampling_params=GREEDY)
    flushed(engine)
    assert Tiny.state(engine)["server_args"]["dump_requests_folder"] == ""
    engine.configure_logging(dump_requests_folder=str(tmp_path / "dumps"))
    engine.generate(input_ids=[5], sampling_params=GREEDY, rid="later")
    engine.shutdown()
    assert len(lines_of(tmp_path / "dumps")) == 2
    assert "later" in {line["rid"] for line in lines_of(tmp_path / "dumps")}


def test_a_tokenizer_that_fails_costs_the_text_alone(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The sample is logged with its ids and dumped without text, and the next one too."""
    asked: dict[str, Any] = {"log_requests": True, "log_requests_level": 2}
    engine.configure_logging(dump_requests_folder=str(tmp_path), **asked)

    def fail(*_: Any, **__: Any) -> str:
        raise ValueError("no such id")

    monkeypatch.setattr(engine.client.tokenizer, "decode", fail)
    for _ in range(2):
        stream = engine.client.generate_request(
            requests.GenerateReqInput(input_ids=[5], sampling_params=GREEDY)
        )
        with pytest.raises(ValueError, match="no such id"):
            engine.llm.run(stream.result())
    engine.shutdown()
    assert [(line["output_ids"], line["text"]) for line in lines_of(tmp_path)] == [([6, 7, 8, 9], "")] * 2
    texts = [record.getMessage() for record in caplog.records if record.name == "tokenspeed_rl.requests"]
    assert len(texts) == 2 and all("output: [6, 7, 8, 9]" in text for text in texts)


@pytest.mark.parametrize("failing", ["write", "short", "folder"])
def test_a_full_disk_stops_the_dump_alone(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, failing: str
) -> None:
    """Requests never notice; the state, the settings and the log tell; what was written is whole lines; and
    it can be turned on again."""
    folder = tmp_path / "full"
    engine.configure_logging(dump_requests_folder=str(folder), dump_requests_threshold=2)
    engine.generate(input_ids=[5], sampling_params=GREEDY)
    flushed(engine)
    files = engine.client._core.watch._requests._wanted.files
    if failing == "folder":
        engine.generate(input_ids=[5], sampling_params=GREEDY)
        flushed(engine)
        folder.rename(tmp_path / "away")
    else:
        write = files._file.write

        class Full:
            """A disk with room for half a line."""

            def __init__(self, file: Any) -> None:
                self._whole = file

            def write(self, line: bytes) -> int:
                count = int(write(line[: len(line) // 2]))
                if failing == "write":
                    raise OSError(28, "No space left on device")
                return count

            def __getattr__(self, name: str) -> Any:
                return getattr(self._whole, name)

        files._file = Full(files._file)
    for _ in range(3):
        assert engine.generate(input_ids=[5], sampling_params=GREEDY)["output_ids"] == [6, 7, 8, 9]
    flushed(engine)
    state = Tiny.state(engine)
    assert "stopped" in state["request_log"]["dump_error"]
    assert state["server_args"]["dump_requests_folder"] == ""
    assert len([text for text in caplog.messages if "the dump to" in text]) == 1
    where = tmp_path / "away" if failing == "folder" else folder
    assert len(lines_of(where)) == state["request_log"]["dumped"] == (2 if failing == "folder" else 1)
    engine.configure_logging(dump_requests_folder=str(tmp_path / "next"))
    engine.generate(input_ids=[5], sampling_params=GREEDY)
    engine.shutdown()
    assert len(lines_of(tmp_path / "next")) == 1


def test_memory_is_bounded_when_the_disk_is_slow(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can't be written in time is counted and let go of."""
    monkeypatch.setattr(request_log, "MOST_WAITING", 3)
    go_on, stuck = threading.Event(), threading.Event()

    def slow(request: Any, tokenizer: Any) -> dict[str, Any]:
        stuck.set()
        assert go_on.wait(WAIT)
        return {"rid": request.rid}

    monkeypatch.setattr(request_log, "record", slow)
    engine.configure_logging(dump_requests_folder=str(tmp_path))
    engine.generate(input_ids=[5], sampling_params=GREEDY, rid="first")
    assert stuck.wait(WAIT)
    engine.generate(input_ids=[[1]] * 8, sampling_params=GREEDY)
    assert Tiny.state(engine)["request_log"]["dropped"] == 5
    go_on.set()
    engine.shutdown()
    assert len(lines_of(tmp_path)) == 4 and lines_of(tmp_path)[0] == {"rid": "first"}


def test_nothing_is_left_of_it(make_engine: MakeEngine, counting: Any, tmp_path: Path) -> None:
    """No thread and no open file after shutdown; none at all for an engine that never logged."""
    before = set(threading.enumerate())
    engine = make_engine(counting, dump_requests_folder=str(tmp_path))
    engine.generate(input_ids=[5], sampling_params=GREEDY)
    assert "tokenspeed_rl-requests" in {thread.name for thread in threading.enumerate()}
    engine.shutdown()
    assert not {t for t in set(threading.enumerate()) - before if t.name.startswith("tokenspeed_rl")}
    opened = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
              if os.path.islink(f"/proc/self/fd/{fd}")]  # fmt: skip
    assert not [path for path in opened if path.startswith(str(tmp_path))]
    quiet = make_engine(counting)
    quiet.generate(input_ids=[5], sampling_params=GREEDY)
    assert "tokenspeed_rl-requests" not in {thread.name for thread in threading.enumerate()}


def test_no_thread_to_be_had(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine out of threads costs nobody a result: the sample is written with the next that ends."""
    engine.generate("first", GREEDY)
    engine.configure_logging(dump_requests_folder=str(tmp_path))
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "tokenspeed_rl-requests":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert engine.generate("one", GREEDY, timeout=WAIT)["output_ids"]
    engine.generate("two", GREEDY)
    engine.shutdown()
    assert len(lines_of(tmp_path)) == 2


def test_a_failure_told_late_ends_no_later_dump(tmp_path: Path) -> None:
    """Of two dumps to one folder the first's failure, told when the second is on, leaves that on."""
    told: list[DumpFiles] = []
    log = RequestLog(lambda: None, logging.getLogger("tokenspeed_rl.test"), told.append)
    config = EngineConfig(dump_requests_folder=str(tmp_path))
    log.configure(config, tmp_path)
    first = log._wanted.files
    assert first is not None
    first.error = "it failed"
    log.configure(config)
    second = log._wanted.files
    assert second is not None and second is not first
    assert not log.stop(first) and log._wanted.files is second
    assert log.stop(second) and log._wanted.files is None


def test_a_dump_deleted_under_way(engine: Engine, tmp_path: Path) -> None:
    """It stops and says why, rather than write where nobody can read; asked for again, it goes on."""
    folder = tmp_path / "dump"
    engine.configure_logging(dump_requests_folder=str(folder))
    engine.generate("one", GREEDY)
    log = engine.client._core.watch._requests
    assert log.settle(WAIT)
    shutil.rmtree(folder)
    engine.generate("two", GREEDY)
    assert log.settle(WAIT)
    state = Tiny.state(engine)
    assert "was deleted" in state["request_log"]["dump_error"] and state["request_log"]["dumped"] == 1
    assert state["server_args"]["dump_requests_folder"] == ""
    engine.configure_logging(dump_requests_folder=str(folder))
    engine.generate("three", GREEDY)
    assert log.settle(WAIT) and len(lines_of(folder)) == 1


def test_a_path_that_is_none(engine: Engine) -> None:
    for path in ("\0", "~nobody-of-this-name/x"):
        with pytest.raises(RequestError, match="dump_requests_folder can't be written"):
            engine.configure_logging(dump_requests_folder=path)
