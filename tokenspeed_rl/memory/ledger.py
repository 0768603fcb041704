"""The books: who has how many bytes mapped, reserved and saved."""

from __future__ import annotations

from tokenspeed_rl.memory.region import TAGS, Usage


class Entry:
    """What one region or backup holds; written by its owner's thread, read by any."""

    def __init__(self, tag: str, *, virtual: int = 0, host: int = 0) -> None:
        self.tag = tag
        self.mapped = 0
        self.virtual = virtual
        self.host = host


class Ledger:
    """All entries of one memory.

    It has no lock, since the garbage collector may strike an entry out in the middle of anything, a locked
    section too: each entry has one writer, and the set of them changes in single, atomic steps.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._entries: dict[int, Entry] = {}

    @property
    def mapped(self) -> int:
        """Bytes mapped now, all tags together."""
        return sum(entry.mapped for entry in list(self._entries.values()))

    def enter(self, tag: str, *, virtual: int = 0, host: int = 0) -> Entry:
        """A new entry, counted from now on."""
        entry = Entry(tag, virtual=virtual, host=host)
        self._entries[id(entry)] = entry
        return entry

    def book(self, entry: Entry, mapped: int) -> None:
        """`entry` has `mapped` bytes mapped from now on."""
        entry.mapped = mapped
        self.peak = max(self.peak, self.mapped)

    def strike(self, entry: Entry) -> None:
        """`entry` is no more."""
        self._entries.pop(id(entry), None)

    def usage(self) -> dict[str, Usage]:
        """The sums per tag, all of `TAGS`. From any thread."""
        entries = list(self._entries.values())
        return {
            tag: Usage(
                mapped=sum(entry.mapped for entry in entries if entry.tag == tag),
                virtual=sum(entry.virtual for entry in entries if entry.tag == tag),
                host=sum(entry.host for entry in entries if entry.tag == tag),
            )
            for tag in TAGS
        }
