"""Records stretches of steps with torch's profiler, on the thread that runs them, into Chrome traces."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tokenspeed_rl.errors import EngineStateError


def refuse_beside_another() -> None:
    """Raises EngineStateError while a profiler of this process is running: a second one would break it."""
    if getattr(torch.autograd.profiler, "_is_profiler_enabled", False):
        raise EngineStateError(
            "another profiler is running in this process, and torch allows only one",
            fix="Stop that one first.",
        )


class TorchRecorder:
    """`Recorder` of lifecycle/profiling.py. Parts of a kind become one trace."""

    def __init__(
        self,
        folder: Path,
        activities: Collection[ProfilerActivity],
        *,
        with_stack: bool,
        record_shapes: bool,
        rank: int = 0,
    ) -> None:
        """Files in `folder` are called <time>-rank<rank>[-prefill | -decode].trace.json."""
        self._folder = folder
        self._make = partial(
            profile, activities=tuple(activities), with_stack=with_stack, record_shapes=record_shapes
        )
        self._name = f"{time.strftime('%Y%m%d-%H%M%S')}-rank{rank}"
        self._profile: Any = None
        self._kind = ""
        self._parts: dict[str, list[Path]] = {}

    def begin(self, kind: str) -> None:
        """Start torch's profiler."""
        refuse_beside_another()
        self._kind = kind
        self._profile = self._make()
        self._profile.start()

    def finish(self) -> None:
        """Stop it, and put what it has in a file."""
        parts = self._parts.setdefault(self._kind, [])
        part = self._free_path(f"{self._kind}.part{len(parts)}")
        recorded, self._profile = self._profile, None
        recorded.stop()
        parts.append(part)
        recorded.export_chrome_trace(str(part))
        if not part.exists():  # torch says so on stderr alone
            raise OSError(f"torch could not write {part}: the disk may be full, or the folder gone")

    def write(self) -> list[str]:
        """The parts of each kind as one trace."""
        written = []
        for kind, parts in self._parts.items():
            path = self._free_path("" if kind == "steps" else kind)
            if len(parts) == 1:
                parts[0].rename(path)
            else:
                whole = parts[0].with_suffix(".whole")
                parts.append(whole)  # to be dropped like them, should the disk be full
                whole.write_text(json.dumps(_joined(parts[:-1])), encoding="utf-8")
                whole.rename(path)
                for part in parts[:-1]:
                    part.unlink()
            written.append(str(path))
        return written

    def drop(self) -> None:
        """Leave nothing behind, whatever state this is in."""
        recorded, self._profile = self._profile, None
        if recorded is not None:
            with suppress(Exception):
                recorded.stop()
        for part in (part for parts in self._parts.values() for part in parts):
            for path in (part, part.with_name(part.name + ".tmp")):  # the latter is torch's
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def _free_path(self, tail: str) -> Path:
        """A path that no other profile has taken."""
        stem = "-".join(filter(None, (self._name, tail)))
        number, path = 1, self._folder / f"{stem}.trace.json"
        while path.exists():
            number += 1
            path = self._folder / f"{stem}-{number}.trace.json"
        return path


def _joined(parts: list[Path]) -> dict[str, Any]:
    """One trace out of several of the same process, on the clock of the first."""
    traces: list[dict[str, Any]] = [json.loads(part.read_text(encoding="utf-8")) for part in parts]
    whole, base = traces[0], traces[0].get("baseTimeNanoseconds", 0)
    for trace in traces[1:]:
        later = (trace.get("baseTimeNanoseconds", 0) - base) / 1000
        for event in trace["traceEvents"]:
            if later and "ts" in event:
                event["ts"] += later
        whole["traceEvents"] += trace["traceEvents"]
    return whole
