"""The update slot, by itself: one update at a time, and who is inside of its iterator."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_rl.errors import EngineStateError
from tokenspeed_rl.lifecycle.update_slot import UpdateSlot


@pytest.fixture
def slot() -> UpdateSlot:
    return UpdateSlot()


@pytest.fixture
def elsewhere() -> Iterator[ThreadPoolExecutor]:
    """Another thread."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def inside(slot: UpdateSlot) -> bool:
    try:
        slot.check_outside("generate")
    except EngineStateError as error:
        assert "generate was called from inside the iterator of a weight update" in str(error)
        return True
    return False


def test_one_update_at_a_time(slot: UpdateSlot) -> None:
    """Contract 5, 6: while an update is going on a second one, a release and a wake are refused with the
    reason; when it has ended they are not."""
    first, second = object(), object()
    slot.refuse("release")
    slot.claim(first)
    assert slot.taken and not slot.writing
    for call in (lambda: slot.claim(second), lambda: slot.refuse("release"), lambda: slot.claim(first)):
        with pytest.raises(EngineStateError, match="a weight update is going on"):
            call()
    assert slot.end(first) and not slot.taken
    slot.claim(second)
    assert slot.end(second)


def test_only_its_owner_ends_it(slot: UpdateSlot) -> None:
    """An update that never began, or is over, ends nobody's; so a refused one leaves the other alone."""
    first, second = object(), object()
    assert not slot.end(first)
    slot.claim(first)
    slot.writing = True
    assert not slot.end(second) and slot.taken and slot.writing
    assert slot.end(first) and not slot.writing
    assert not slot.end(first)


def test_weights_are_not_read_while_written(slot: UpdateSlot) -> None:
    """Contract 6: from the first write to the end the weights are neither old nor new: reading is refused."""
    slot.claim(owner := object())
    slot.refuse_while_writing()
    slot.writing = True
    with pytest.raises(EngineStateError, match="half written"):
        slot.refuse_while_writing()
    slot.end(owner)
    slot.refuse_while_writing()


def test_who_is_inside_the_iterator(slot: UpdateSlot, elsewhere: ThreadPoolExecutor) -> None:
    """E15: the caller's code that runs for the iterator is inside, with whatever it starts on an event loop
    or hands its context to; another thread is not, and nobody is before or after."""

    async def asked() -> bool:
        return await asyncio.create_task(asyncio.to_thread(inside, slot))

    assert not inside(slot)
    with slot.iterating():
        assert inside(slot)
        assert asyncio.run(asked())
        assert elsewhere.submit(copy_context().run, inside, slot).result(5)
        assert not elsewhere.submit(inside, slot).result(5)
    assert not inside(slot) and not asyncio.run(asked())


def test_an_iterator_that_raises(slot: UpdateSlot) -> None:
    """E14, E15: after an exception out of the iterator nobody is inside."""
    with pytest.raises(ZeroDivisionError), slot.iterating():
        raise ZeroDivisionError
    assert not inside(slot)


def test_what_the_iterator_started_and_left_behind(slot: UpdateSlot, elsewhere: ThreadPoolExecutor) -> None:
    """E15: a thread or task with the iterator's context that goes on after it may call again."""
    go_on = threading.Event()

    def later() -> bool:
        assert go_on.wait(5)
        return inside(slot)

    with slot.iterating():
        left = elsewhere.submit(copy_context().run, later)
    go_on.set()
    assert left.result(5) is False


def test_updates_of_two_engines(slot: UpdateSlot) -> None:
    """G9: from inside one engine's update another engine may be called, even updated."""
    other = UpdateSlot()
    with slot.iterating():
        assert inside(slot) and not inside(other)
        with other.iterating():
            assert inside(slot) and inside(other)
        assert inside(slot) and not inside(other)
    assert not inside(slot)


@given(st.lists(st.tuples(st.sampled_from(["claim", "write", "end"]), st.integers(0, 2)), max_size=30))
def test_any_sequence_of_updates(calls: list[tuple[str, int]]) -> None:
    """B1: whatever several updaters do, at most one is going on, and only it is writing."""
    slot, owners, going_on, writing = UpdateSlot(), [object() for _ in range(3)], None, False
    for call, who in calls:
        if call == "claim" and going_on is not None:
            with pytest.raises(EngineStateError):
                slot.claim(owners[who])
        elif call == "claim":
            slot.claim(owners[who])
            going_on = who
        elif call == "end":
            assert slot.end(owners[who]) is (who == going_on)
            if who == going_on:
                going_on, writing = None, False
        elif who == going_on:
            slot.writing = writing = True
        assert (slot.taken, slot.writing) == (going_on is not None, writing)
