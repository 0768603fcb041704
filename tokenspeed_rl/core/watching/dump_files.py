"""Files of JSON lines that only their owner may read."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from errno import ENOENT
from io import FileIO
from pathlib import Path

from tokenspeed_rl.errors import RequestError


class DumpFiles:
    """Lines go into one file after the other, `threshold` in each, mode 0600. One thread writes."""

    def __init__(self, folder: str, threshold: int) -> None:
        """Makes the folder.

        Raises:
            RequestError: it can't be made, or nothing can be written there.
        """
        self.asked = (folder, threshold)
        self.error: str | None = None
        """Why nothing more goes in, once it failed."""
        self.threshold = threshold
        self._file: FileIO | None = None
        self._lines = 0
        self._number = 0
        try:
            self.folder = Path(folder).expanduser().absolute()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._open().close()
            os.unlink(self._path)
        except (OSError, ValueError, RuntimeError) as error:  # a path with \0, or of a user unknown
            raise RequestError(
                f"dump_requests_folder can't be written: {error}", got=folder, fix="Name another folder."
            ) from error

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
