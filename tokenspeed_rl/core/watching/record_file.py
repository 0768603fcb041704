"""A record as a JSON file that only its owner may read."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_record(folder: str | Path, kind: str, record: Any) -> str:
    """Write `record` into a new file of `folder`, which is made if need be; returns the file's path.

    Raises:
        OSError: no file is left then.
    """
    path = Path(folder) / f"{kind}-{time.time_ns()}-{os.getpid()}.json"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(file, "w", encoding="utf-8") as stream:
            json.dump(record, stream)
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise
    return str(path)
