"""How much memory this process holds, as Linux counts it; elsewhere everything is 0."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
MB = 1e6


def status(*keys: str) -> list[int]:
    """Bytes of lines of the process's status, such as RssAnon."""
    try:
        lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
        return [int(lines[key].split()[0]) * 1024 for key in keys]
    except (OSError, KeyError):
        return [0] * len(keys)


def held() -> int:
    """Bytes that are the process's alone, which no file could give again."""
    return status("RssAnon")[0]


def reset_peak() -> None:
    """Let `peak` begin anew, where the system lets a process ask for that."""
    with suppress(OSError):
        CLEAR_REFS.write_text(RESET_PEAK)


def peak() -> int:
    """Most bytes held since `reset_peak`; files and libraries count as they are mapped now."""
    most, files, shared = status("VmHWM", "RssFile", "RssShmem")
    return most - files - shared


class MemoryUse:
    """Peaks by phase, in bytes, and what an engine gave back at the end of one."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self.around_release = [0, 0]
        """Held before and after the release that gave most."""

    def facts(self) -> dict[str, float | list[float]]:
        """For a run's summary, in megabytes."""
        peaks = {f"peak_megabytes_{name}": nbytes / MB for name, nbytes in self.peaks.items()}
        return {**peaks, "megabytes_around_release": [nbytes / MB for nbytes in self.around_release]}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Within, `peaks[name]` is measured; phases of the same name add up to one peak."""
        reset_peak()
        try:
            yield
        finally:
            self.peaks[name] = max(self.peaks.get(name, 0), peak())

    @contextmanager
    def generating(self, resident: AbstractContextManager[None]) -> Iterator[None]:
        """A phase within `resident`, an engine's, at whose end the engine gives its memory back."""
        with self.phase("generating"):
            with resident:
                yield
                before = held()
            after = held()
        if before - after >= self.around_release[0] - self.around_release[1]:
            self.around_release = [before, after]
