"""Residency, by itself: which tags a call means, and that a wake is whole or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_rl.errors import EngineStateError, OutOfMemoryError, RequestError
from tokenspeed_rl.lifecycle.residency import Residency

TAGS = ("weights", "kv_cache", "cuda_graph")
SUBSETS = [subset for count in range(4) for subset in combinations(TAGS, count)]


class Memory:
    """Parts that note what happens to them; a shared countdown makes a release or map fail."""

    def __init__(self) -> None:
        self.acts: list[str] = []
        self.mapped = set(TAGS)
        self.fail_at: int | None = None
        self.residency = Residency({tag: _Part(self, tag) for tag in TAGS})

    def act(self, what: str, tag: str) -> None:
        if self.fail_at is not None:
            self.fail_at -= 1
            if self.fail_at == 0:
                self.fail_at = None
                raise OutOfMemoryError(f"{what} of {tag}", 8, 4)
        self.acts.append(f"{what} {tag}")

    def sleep(self, tags: Any) -> None:
        self.residency.release(self.residency.to_release(tags))

    def wake(self, tags: Any) -> None:
        self.residency.resume(self.residency.to_resume(tags))


class _Part:
    def __init__(self, memory: Memory, tag: str) -> None:
        self._memory, self._tag = memory, tag

    def release(self) -> None:
        self._memory.act("release", self._tag)
        self._memory.mapped.remove(self._tag)

    def map(self) -> None:
        self._memory.act("map", self._tag)
        assert self._tag not in self._memory.mapped
        self._memory.mapped.add(self._tag)

    def undo_map(self) -> None:
        self._memory.acts.append(f"undo {self._tag}")
        self._memory.mapped.remove(self._tag)

    def restore(self) -> None:
        self._memory.acts.append(f"restore {self._tag}")


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.mark.parametrize("asleep", SUBSETS)
@pytest.mark.parametrize("wanted", [None, *SUBSETS[1:]])
def test_which_tags_a_call_means(memory: Memory, asleep: Sequence[str], wanted: Any) -> None:
    """Contract 5: None is what is resident for a release and exactly what sleeps for a wake, also nothing; a
    name in the wrong state is an error that changes nothing."""
    residency = memory.residency
    if asleep:
        memory.sleep(asleep)
    assert residency.asleep is bool(asleep) and residency.sleeping() == tuple(asleep)
    for find, already, left in (
        (residency.to_release, set(asleep), set(TAGS) - set(asleep)),
        (residency.to_resume, set(TAGS) - set(asleep), set(asleep)),
    ):
        if wanted is None:
            assert find(None) == tuple(tag for tag in TAGS if tag in left)
        elif already & set(wanted):
            with pytest.raises(EngineStateError, match="nothing was changed") as caught:
                find(wanted)
            assert all(tag in caught.value.what for tag in already & set(wanted))
        else:
            assert find(list(reversed(wanted))) == wanted
    assert residency.released == set(asleep) and memory.mapped == set(TAGS) - set(asleep)


@pytest.mark.parametrize("tags", ["", "gpu", [], (), ["weights", "gpu"], [None], [["weights"]], 3, {}])
def test_unknown_tags(memory: Memory, tags: Any) -> None:
    """Unknown or no tags are a RequestError that names those there are; nothing is touched."""
    for call in (memory.sleep, memory.wake):
        with pytest.raises(RequestError, match="weights, kv_cache, cuda_graph"):
            call(tags)
    assert memory.acts == [] and not memory.residency.asleep


def test_one_tag_as_a_string_and_tags_given_twice(memory: Memory) -> None:
    """A bare string is one tag; a tag given twice counts once."""
    memory.sleep("kv_cache")
    memory.sleep(["weights", "weights"])
    memory.wake(("kv_cache", "kv_cache"))
    memory.wake("weights")
    assert memory.acts == [
        *("release kv_cache", "release weights"),
        *("map kv_cache", "restore kv_cache", "map weights", "restore weights"),
    ]


def test_a_wake_restores_when_everything_is_mapped(memory: Memory) -> None:
    """A wake maps in one order, whatever the caller's; backups are copied back once no part can fail."""
    memory.sleep(None)
    memory.acts.clear()
    memory.wake(["cuda_graph", "kv_cache", "weights"])
    assert memory.acts == [f"{act} {tag}" for act in ("map", "restore") for tag in TAGS]


@pytest.mark.parametrize("asleep", SUBSETS[1:])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_wake_that_fails_at_any_map(memory: Memory, asleep: Sequence[str], at: int) -> None:
    """A2: whichever map fails, what was mapped before the call is mapped still and nothing else, nothing was
    restored, and a later try succeeds."""
    memory.sleep(asleep)
    memory.acts.clear()
    if at <= len(asleep):
        memory.fail_at = at
        with pytest.raises(OutOfMemoryError, match=f"map of {asleep[at - 1]}"):
            memory.wake(None)
        assert memory.mapped == set(TAGS) - set(asleep) and memory.residency.released == set(asleep)
        assert not any(act.startswith("restore") for act in memory.acts)
        undone = [act.removeprefix("undo ") for act in memory.acts if act.startswith("undo ")]
        assert undone == list(reversed(asleep[: at - 1]))
    memory.wake(asleep)
    assert memory.mapped == set(TAGS) and not memory.residency.asleep


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_release_that_fails(memory: Memory, at: int) -> None:
    """A release that can't (no host memory for a backup) leaves that part resident; state and memory agree,
    and the rest can be released later."""
    memory.fail_at = at
    with pytest.raises(OutOfMemoryError):
        memory.sleep(None)
    assert memory.residency.released == set(TAGS[: at - 1]) == set(TAGS) - memory.mapped
    memory.sleep(None)
    assert memory.mapped == set() and memory.residency.released == set(TAGS)


@pytest.mark.parametrize("asleep", SUBSETS)
def test_what_sleeps_is_required_by_name(memory: Memory, asleep: Sequence[str]) -> None:
    """Contract 5: generate needs all tags, an update only `weights`; the error names what is released."""
    if asleep:
        memory.sleep(asleep)
    for needed in [(), *((tag,) for tag in TAGS), ("weights", "kv_cache")]:
        missing = [tag for tag in TAGS if tag in asleep and tag in (needed or TAGS)]
        if missing:
            with pytest.raises(EngineStateError, match=f"sleeps: {', '.join(missing)} released"):
                memory.residency.require(*needed)
        else:
            memory.residency.require(*needed)
        assert memory.residency.sleeping(needed) == tuple(missing)


CHOICES = st.one_of(st.none(), st.sampled_from(TAGS), st.sampled_from(SUBSETS[1:]))
CALLS = st.tuples(st.booleans(), CHOICES, st.one_of(st.none(), st.integers(1, 3)))


@given(st.lists(CALLS, max_size=20))
def test_any_sequence_of_calls(calls: list[tuple[bool, Any, int | None]]) -> None:
    """B1: after any releases and wakes, some of them failing, state and memory agree, and a wake is whole or
    nothing."""
    memory, asleep = Memory(), set[str]()
    for release, tags, fail_at in calls:
        named = {tags} if isinstance(tags, str) else set(tags or ())
        able = set(TAGS) - asleep if release else set(asleep)
        wanted = able if tags is None else named
        memory.fail_at = fail_at
        call = memory.sleep if release else memory.wake
        if not wanted <= able:
            with pytest.raises(EngineStateError):
                call(tags)
        elif fail_at is not None and fail_at <= len(wanted):
            with pytest.raises(OutOfMemoryError):
                call(tags)
            if release:
                asleep |= set([tag for tag in TAGS if tag in wanted][: fail_at - 1])
        else:
            call(tags)
            asleep = asleep | wanted if release else asleep - wanted
        assert memory.residency.released == asleep == set(TAGS) - memory.mapped
