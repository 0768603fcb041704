"""Files of JSON lines that only their owner may read."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from errno import ENOENT
from functools import partial
from io import FileIO
from pathlib import Path

from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.lifecycle.reply import answer


def prepare_folder(folder: str) -> Path:
    """Make the folder, and see that a file can be written there. A network's may hang in this for ever, so
    neither the loop nor anybody with its lock may call it.

    Raises:
        RequestError: it can't be made, or nothing can be written there.
    """
    try:
        path = Path(folder).expanduser().absolute()
        path.mkdir(parents=True, exist_ok=True)
        files = DumpFiles((folder, 1), path)
        files._open().close()
        os.unlink(files._path)
    except (OSError, ValueError, RuntimeError) as error:  # a path with \0, or of a user unknown
        raise RequestError(
            f"dump_requests_folder can't be written: {error}", got=folder, fix="Name another folder."
        ) from error
    return path


def prepare_beside(folder: str, reply: Future[Path]) -> None:
    """`prepare_folder` on a thread of its own, which nobody waits for once `reply` has another answer."""

    def work() -> None:
        prepared: Future[Path] = Future()
        answer(prepared, partial(prepare_folder, folder))
        answer(reply, prepared.result)

    threading.Thread(target=work, name="tokenspeed_rl-dump-folder", daemon=True).start()


class DumpFiles:
    """Lines go into one file after the other, `threshold` in each, mode 0600. One thread writes."""

    def __init__(self, asked: tuple[str, int], folder: Path) -> None:
        """`asked` are folder and threshold as they were given; `folder` is what `prepare_folder` made of the
        former."""
        self.asked = asked
        self.folder = folder
        self.error: str | None = None
        """Why nothing more goes in, once it failed."""
        self.threshold = asked[1]
        self._file: FileIO | None = None
        self._lines = 0
        self._number = 0

    def write(self, line: bytes) -> None:
        """Append a line, whole or not at all. Raises OSError."""
        if self._file is None:
            self._file, self._lines = self._open(), 0
        if not os.fstat(self._file.fileno()).st_nlink:
            raise FileNotFoundError(ENOENT, "it was deleted", str(self._path))
        end = self._file.tell()
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes were written")
        except OSError:
            with suppress(OSError):
                self._file.truncate(end)
            raise
        self._lines += 1
        if self._lines >= self.threshold:
            self.close()

    def close(self) -> None:
        """End the current file; a later line begins another."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open(self) -> FileIO:
        """A file that wasn't there."""
        while True:
            stamp = time.strftime("%Y%m%d-%H%M%S")
            self._path = self.folder / f"requests-{stamp}-{os.getpid()}-{self._number:05d}.jsonl"
            self._number += 1
            with suppress(FileExistsError):
                handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                return FileIO(handle, "wb")
