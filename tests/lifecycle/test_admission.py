"""Admission, by itself: what each mode does, and who is answered when."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_rl.errors import EngineStateError, RequestError
from tokenspeed_rl.lifecycle.admission import MODES, Admission, answer


class Queue:
    """Requests that are numbers: what is queued runs, and ends when told to."""

    def __init__(self) -> None:
        self.queued: list[int] = []
        self.acts: list[str] = []
        self.rests = 0
        self.admission: Admission[int] = Admission(
            end_all=self._end_all,
            retract_all=lambda: self.acts.append("retract"),
            enqueue=self._enqueue,
            come_to_rest=self._come_to_rest,
        )

    def pause(self, mode: Any) -> Future[bool]:
        reply: Future[bool] = Future()
        self.admission.pause(mode, reply, busy=self.busy)
        return reply

    def release(self, then: Callable[[], Any] = lambda: None) -> Future[Any]:
        reply: Future[Any] = Future()
        self.admission.drain("a release of x", then, reply, busy=self.busy)
        self.admission.settle()
        return reply

    def submit(self, *requests: int) -> None:
        if not self.admission.hold(requests):
            self._enqueue(requests)

    def end(self) -> None:
        """Everything queued runs out."""
        self.queued.clear()
        self.admission.settle()

    def busy(self) -> bool:
        return bool(self.queued)

    def seen(self) -> tuple[Any, ...]:
        admission = self.admission
        return admission.mode, admission.draining, admission.steps, admission.frozen, tuple(self.queued)

    def _enqueue(self, requests: Iterable[int]) -> None:
        self.queued += requests

    def _come_to_rest(self) -> None:
        self.rests += 1

    def _end_all(self) -> None:
        self.acts.append("end")
        self.queued.clear()


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.mark.parametrize("mode", ["abort", "wait", "keep", "retract"])
def test_the_device_is_at_rest_when_a_pause_is_answered(mode: str) -> None:
    """B1: whoever hears that a pause holds may write shared weights: nothing that was begun reads them."""
    queue = Queue()
    queue.submit(1)
    reply = queue.pause(mode)
    queue.end()
    assert reply.result(0) is True and queue.rests == 1


@pytest.mark.parametrize("second", MODES)
@pytest.mark.parametrize("first", [None, *MODES])
def test_pausing_when_idle(queue: Queue, first: str | None, second: str) -> None:
    """C1: with nothing there every pause is answered True at once, also one on top of another; resuming, a
    running engine too, is fine."""
    if first is not None:
        queue.pause(first)
        queue.admission.settle()
    reply = queue.pause(second)
    queue.admission.settle()
    assert reply.result(0) is True
    assert queue.seen() == (second, None, False, second == "keep", ())
    for _ in range(2):
        queue.admission.resume()
        assert queue.seen() == (None, None, True, False, ())


@pytest.mark.parametrize(
    "mode, acts, left, done",
    [
        ("abort", ["end"], (), True),
        ("wait", [], (1, 2), False),
        ("keep", [], (1, 2), True),
        ("retract", ["retract"], (1, 2), True),
    ],
)
def test_what_a_mode_does(queue: Queue, mode: str, acts: list[str], left: Any, done: bool) -> None:
    """Contract 5, the modes: `abort` ends what is there, `retract` takes its KV, `keep` touches nothing; all
    three reply at once. `wait` lets it run, and replies later."""
    queue.submit(1, 2)
    reply = queue.pause(mode)
    queue.admission.settle()
    assert (queue.acts, tuple(queue.queued), reply.done()) == (acts, left, done)
    assert queue.admission.steps is (mode == "wait")
    queue.end()
    assert reply.result(0) is True and not queue.admission.steps


def test_a_pause_that_waits(queue: Queue) -> None:
    """Contract 5: during a drain what was there runs, what comes waits outside and in its order; the reply
    comes when the last has ended, and then the newcomers queue without being run."""
    queue.submit(1, 2)
    reply = queue.pause("wait")
    queue.submit(3)
    queue.submit(4, 5)
    queue.queued.remove(1)
    queue.admission.settle()
    assert not reply.done() and queue.seen() == ("wait", "a pause that waits", True, False, (2,))
    queue.end()
    assert reply.result(0) is True
    assert queue.seen() == ("wait", None, False, False, (3, 4, 5))
    queue.submit(6)
    queue.admission.resume()
    assert queue.queued == [3, 4, 5, 6]


def test_a_release_that_drains(queue: Queue) -> None:
    """Contract 5: a release of a running engine acts once the requests that were there have ended; those that
    came meanwhile queue after it."""
    queue.submit(1)
    reply = queue.release(lambda: list(queue.queued))
    queue.submit(2)
    assert queue.seen() == (None, "a release of x", True, False, (1,)) and not reply.done()
    queue.end()
    assert reply.result(0) == [] and queue.queued == [2]
    assert queue.seen() == (None, None, True, False, (2,))


@pytest.mark.parametrize("mode", ["", "Abort", "stop", None, 3, ["wait"]])
@pytest.mark.parametrize("before", [None, "keep"])
def test_an_unknown_mode_changes_nothing(queue: Queue, before: str | None, mode: Any) -> None:
    """Contract 5: an unknown mode is a RequestError that names the four; nothing is ended or answered."""
    if before is not None:
        queue.pause(before)
    queue.submit(1)
    seen = queue.seen()
    with pytest.raises(RequestError, match="abort, wait, keep, retract"):
        queue.pause(mode)
    assert queue.seen() == seen and queue.acts == []


@pytest.mark.parametrize("draining", ["pause", "release"])
@pytest.mark.parametrize("mode", [*MODES, "release"])
def test_a_second_one_is_refused_during_a_drain(queue: Queue, draining: str, mode: str) -> None:
    """Contract 5: during any drain a second pause or release is refused with its reason, and the first goes
    on."""
    queue.submit(1)
    first = queue.pause("wait") if draining == "pause" else queue.release()
    seen = queue.seen()
    with pytest.raises(EngineStateError, match=r"is waiting for requests to end.*resume"):
        queue.release() if mode == "release" else queue.pause(mode)
    assert queue.seen() == seen and not first.done() and queue.acts == []
    queue.end()
    assert first.done()


@pytest.mark.parametrize("before", [None, "keep", "retract"])
def test_resume_withdraws_a_pause(queue: Queue, before: str | None) -> None:
    """Contract 5: resume withdraws a pause that waits, which answers False, lets the held in and runs."""
    if before is not None:
        queue.pause(before)
    queue.submit(1)
    reply = queue.pause("wait")
    queue.submit(2, 3)
    queue.admission.resume()
    assert reply.result(0) is False
    assert queue.seen() == (None, None, True, False, (1, 2, 3))


def test_resume_withdraws_a_release(queue: Queue) -> None:
    """Contract 5: a withdrawn release tells its caller so, and nothing was released."""
    released: list[int] = []
    queue.submit(1)
    reply = queue.release(lambda: released.append(1))
    queue.submit(2)
    queue.admission.resume()
    with pytest.raises(EngineStateError, match="a release of x was withdrawn by a resume"):
        reply.result(0)
    queue.end()
    assert released == [] and queue.seen() == (None, None, True, False, ())


@pytest.mark.parametrize("before", [None, "keep", "retract", "abort"])
def test_a_pause_whose_caller_is_gone(queue: Queue, before: str | None) -> None:
    """Contract 2: a cancelled pause is withdrawn: it counts no more from the cancellation on, the mode is the
    one it replaced, and the held come in."""
    if before is not None:
        queue.pause(before)
    queue.submit(1)
    reply = queue.pause("wait")
    queue.submit(2)
    assert reply.cancel()
    assert queue.admission.mode == before and queue.admission.draining is None
    queue.admission.settle()
    assert queue.seen() == (before, None, before is None, before == "keep", (1, 2))
    queue.admission.resume()
    assert queue.pause("keep").result(0) is True


@pytest.mark.parametrize("again", ["pause", "release"])
def test_a_call_right_after_a_cancelled_one(queue: Queue, again: str) -> None:
    """Contract 2: before anybody looked at the cancelled drain the next pause or release is served already,
    and it goes back to what was there before both when it is cancelled too."""
    queue.submit(1)
    queue.pause("wait").cancel()
    queue.submit(2)
    reply = queue.pause("wait") if again == "pause" else queue.release()
    assert not reply.done() and queue.queued == [1, 2]
    assert reply.cancel()
    queue.admission.settle()
    assert queue.seen() == (None, None, True, False, (1, 2))


def test_a_release_whose_caller_is_gone(queue: Queue) -> None:
    """Contract 2: a cancelled release is withdrawn: nothing is released when the last request has ended."""
    released: list[int] = []
    queue.submit(1)
    queue.release(lambda: released.append(1)).cancel()
    assert queue.admission.draining is None
    queue.submit(2)
    queue.end()
    assert released == [] and queue.seen() == (None, None, True, False, (2,))


def test_a_release_that_fails_at_its_end(queue: Queue) -> None:
    """What a release raises is its caller's; requests that were held run then."""
    queue.submit(1)
    reply = queue.release([].pop)
    queue.submit(2)
    queue.end()
    assert isinstance(reply.exception(0), IndexError)
    assert queue.seen() == (None, None, True, False, (2,))


def test_pausing_while_paused(queue: Queue) -> None:
    """Contract 5: a second pause acts on what is there then, also what came during the first: `wait` runs it
    out, `retract` drops KV, `keep` changes nothing, `abort` ends it."""
    queue.pause("keep")
    queue.submit(1)
    waiting = queue.pause("wait")
    assert queue.admission.steps and not waiting.done()
    queue.end()
    assert waiting.result(0) and not queue.admission.steps
    queue.submit(2)
    for mode in ("retract", "keep"):
        assert queue.pause(mode).result(0) and queue.acts == ["retract"] and queue.queued == [2]
    assert queue.pause("abort").result(0) and queue.acts == ["retract", "end"] and queue.queued == []


@pytest.mark.parametrize("mode", [None, *MODES])
def test_going_back_to_an_earlier_pause(queue: Queue, mode: str | None) -> None:
    """B6: `paused()` ends by restoring the mode of entry, which acts on no request again."""
    queue.pause("keep")
    queue.submit(1)
    queue.admission.resume(mode)
    assert queue.seen() == (mode, None, mode is None, mode == "keep", (1,)) and queue.acts == []


def test_an_answer_goes_to_those_who_wait_only() -> None:
    """A reply that was answered or given up runs nothing; whatever a command raises is its caller's."""
    gone, late, failed = Future[Any](), Future[Any](), Future[Any]()
    assert gone.cancel() and not answer(gone, lambda: pytest.fail("it ran"))
    assert answer(late, lambda: 7) and not answer(late, lambda: pytest.fail("it ran"))
    assert late.result(0) == 7
    assert answer(failed, [].pop) and isinstance(failed.exception(0), IndexError)


class Rules:
    """Contract 5 in a few lines: mode, drain, and who is inside or outside the queue."""

    def __init__(self) -> None:
        self.mode: str | None = None
        self.drain: tuple[str | None, Future[Any], Future[Any]] | None = None  # mode before, reply, expected
        self.inside: list[int] = []
        self.outside: list[int] = []

    def over(self, outcome: object, mode: str | None) -> None:
        """The drain ends, and so does the wait of those outside."""
        if self.drain is not None:
            self.drain[2].set_result(outcome)
        self.mode, self.drain = mode, None
        self.inside, self.outside = self.inside + self.outside, []

    def settle(self) -> None:
        if self.drain is not None and not self.inside:
            self.over(True if self.mode == "wait" else None, self.mode)


CALLS = [*MODES, "release", "resume", "submit", "submit", "end one", "end one", "cancel", "settle"]


@given(st.lists(st.sampled_from(CALLS), max_size=40))
def test_any_sequence_of_calls(calls: list[str]) -> None:
    """B1: after any calls in any order mode, drain, queue and replies are what the rules say, every reply is
    answered in the end, and nobody is lost or overtaken."""
    queue, rules, replies, number = Queue(), Rules(), list[tuple[Future[Any], Future[Any]]](), 0
    for call in [*calls, "resume"]:
        if call == "release" and rules.mode is not None:
            continue  # a paused engine doesn't drain
        if call in MODES or call == "release":
            if rules.drain is not None:
                with pytest.raises(EngineStateError):
                    queue.release() if call == "release" else queue.pause(call)
                continue
            expected: Future[Any] = Future()
            before, rules.mode = rules.mode, rules.mode if call == "release" else call
            reply = queue.release() if call == "release" else queue.pause(call)
            queue.admission.settle()
            replies.append((reply, expected))
            if call == "abort":
                rules.inside = []
            if call in ("wait", "release"):
                rules.drain = (before, reply, expected)
                rules.settle()
            else:
                expected.set_result(True)
        elif call == "resume":
            queue.admission.resume()
            rules.over(False if rules.mode == "wait" else EngineStateError, None)
        elif call == "submit":
            number += 1
            queue.submit(number)
            (rules.inside if rules.drain is None else rules.outside).append(number)
        elif call == "end one":
            del queue.queued[:1]
            queue.admission.settle()
            del rules.inside[:1]
            rules.settle()
        elif call == "cancel" and rules.drain is not None:
            before, reply, _ = rules.drain
            assert reply.cancel()
            queue.admission.settle()
            rules.over("cancelled", before)
        admission = queue.admission
        assert (admission.mode, admission.draining is not None) == (rules.mode, rules.drain is not None)
        assert admission.steps is (rules.mode is None or rules.drain is not None)
        assert queue.queued == rules.inside
    for reply, expected in replies:
        if reply.cancelled():
            assert expected.result(0) == "cancelled"
        elif reply.exception(0) is not None:
            assert type(reply.exception(0)) is expected.result(0)
        else:
            assert reply.result(0) is expected.result(0)
