"""The folder of a dump is made beside the loop: one that hangs holds up nobody but who named it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import Tiny
from tokenspeed_rl import Engine, requests
from tokenspeed_rl.errors import ConfigError, EngineShutdownError

WAIT = 20.0
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 4}


@pytest.fixture
def engine(make_engine: Callable[..., Engine], counting: Any) -> Engine:
    return make_engine(counting)


class HangingFolder:
    """A folder whose making begins, and goes on when told."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.begun, self.go_on = threading.Event(), threading.Event()
        make = Path.mkdir

        def mkdir(folder: Path, *args: Any, **options: Any) -> None:
            if folder == path:
                self.begun.set()
                assert self.go_on.wait(WAIT)
            make(folder, *args, **options)

        monkeypatch.setattr(Path, "mkdir", mkdir)


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingFolder]:
    folder = HangingFolder(tmp_path / "far away", monkeypatch)
    yield folder
    folder.go_on.set()


@pytest.mark.parametrize("call", ["configure_logging", "set_internal_state"])
def test_a_folder_that_hangs_holds_up_its_caller_alone(
    engine: Engine, hanging: HangingFolder, pool: ThreadPoolExecutor, call: str
) -> None:
    """Requests and other settings go on; the dump begins when the folder is there, with what was set
    meanwhile."""
    calling = pool.submit(getattr(engine, call), dump_requests_folder=str(hanging.path))
    assert hanging.begun.wait(WAIT)
    assert engine.generate(input_ids=[5], sampling_params=GREEDY, timeout=5)["output_ids"] == [6, 7, 8, 9]
    engine.set_internal_state(max_running_requests=3)
    engine.configure_logging(dump_requests_threshold=1)
    settings = Tiny.state(engine)["server_args"]
    assert settings["dump_requests_folder"] == "" and settings["max_running_requests"] == 3
    assert not calling.done()
    hanging.go_on.set()
    calling.result(WAIT)
    assert Tiny.state(engine)["server_args"]["dump_requests_folder"] == str(hanging.path)
    for _ in range(2):
        engine.generate(input_ids=[5], sampling_params=GREEDY)
    engine.shutdown()
    assert [len(file.read_text().splitlines()) for file in hanging.path.iterdir()] == [1, 1]


def test_who_waits_for_a_folder_is_freed_by_shutdown(
    engine: Engine, hanging: HangingFolder, pool: ThreadPoolExecutor
) -> None:
    """As everybody who waits is; what is made late changes nothing."""
    calling = pool.submit(engine.set_internal_state, dump_requests_folder=str(hanging.path))
    direct = pool.submit(engine.configure_logging, dump_requests_folder=str(hanging.path))
    assert hanging.begun.wait(WAIT)
    engine.shutdown()
    with pytest.raises(EngineShutdownError):
        calling.result(WAIT)
    hanging.go_on.set()
    with pytest.raises(EngineShutdownError):
        direct.result(WAIT)
    assert engine.client.server_args.dump_requests_folder == ""


def test_who_waits_for_a_folder_can_be_cancelled(engine: Engine, hanging: HangingFolder) -> None:
    """At once, and nothing changes later."""

    async def cancelled() -> None:
        asked = requests.SetInternalStateReq(server_args={"dump_requests_folder": str(hanging.path)})
        calling = asyncio.ensure_future(engine.client.set_internal_state(asked))
        assert await asyncio.to_thread(hanging.begun.wait, WAIT)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling

    asyncio.run(cancelled())
    (making,) = [each for each in threading.enumerate() if each.name == "tokenspeed_rl-dump-folder"]
    hanging.go_on.set()
    making.join(WAIT)
    assert engine.generate(input_ids=[5], sampling_params=GREEDY)["output_ids"] == [6, 7, 8, 9]
    assert Tiny.state(engine)["server_args"]["dump_requests_folder"] == ""


def test_no_folder_is_made_for_a_call_that_is_refused(engine: Engine, tmp_path: Path) -> None:
    """The rest of the call is judged first."""
    for call in (engine.configure_logging, engine.set_internal_state):
        with pytest.raises(ConfigError):
            call(dump_requests_folder=str(tmp_path / "dumps"), dump_requests_threshold=0)
    assert not list(tmp_path.iterdir())
