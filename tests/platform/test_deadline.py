"""Deadlines, and calls that are left behind when they are late."""

from __future__ import annotations

import math
import threading
import time

import pytest

from dagexec.errors import DeadlineExceededError
from dagexec.platform.deadline import Deadline, call_with_timeout, check_deadline, within_deadline
from dagexec.platform.threads import ThreadWait
from tests.interrupts import InterruptedAtPoints


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def test_a_deadline_is_over_when_its_seconds_have_passed(clock: Clock) -> None:
    deadline = Deadline(2.0)
    clock.now += 1.5
    assert deadline.left() == 0.5
    assert not deadline.is_over
    clock.now += 0.5
    assert deadline.is_over
    assert not Deadline(math.inf).is_over


def test_a_part_of_the_time_ends_no_later_than_the_whole(clock: Clock) -> None:
    whole = Deadline(2.0)
    assert whole.within(0.5).left() == 0.5
    clock.now += 1.5
    assert whole.within(5.0).left() == 0.5


def test_who_is_held_to_a_deadline_is_told_that_it_is_over(clock: Clock) -> None:
    check_deadline()
    with within_deadline(Deadline(1.0)):
        check_deadline()
        clock.now += 1.0
        with pytest.raises(DeadlineExceededError):
            check_deadline()
    check_deadline()


def test_an_attempt_gives_what_the_call_gives() -> None:
    ident = call_with_timeout(threading.get_ident, 60.0)
    assert ident != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        call_with_timeout(lambda: 1 // 0, 60.0)


def test_a_call_that_is_late_is_left_behind_and_cleaned_up_after_when_it_ends() -> None:
    go_on, cleaned = threading.Event(), threading.Event()
    with pytest.raises(DeadlineExceededError, match=r"longer than 0\.010 s"):
        call_with_timeout(lambda: go_on.wait(60), 0.01, cleaned.set)
    assert not cleaned.is_set()
    go_on.set()
    assert cleaned.wait(60)


def test_a_call_that_is_left_behind_is_told_that_its_time_is_over() -> None:
    told = threading.Event()
    go_on = threading.Event()

    def call() -> None:
        go_on.wait(60)
        try:
            check_deadline()
        except DeadlineExceededError:
            told.set()

    with pytest.raises(DeadlineExceededError):
        call_with_timeout(call, 0.01)
    go_on.set()
    assert told.wait(60)


def test_a_call_whose_caller_is_interrupted_is_told_and_cleaned_up_after(monkeypatch: pytest.MonkeyPatch) -> None:
    told, cleaned, go_on = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        go_on.wait(60)
        try:
            check_deadline()
        except DeadlineExceededError:
            told.set()

    def interrupted(*_given: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadWait, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call_with_timeout(call, 3600.0, cleaned.set)
    go_on.set()
    assert cleaned.wait(60)
    assert told.is_set()


def test_nothing_is_cleaned_up_after_a_call_in_time() -> None:
    cleaned: list[int] = []
    thread = call_with_timeout(threading.current_thread, 60.0, lambda: cleaned.append(1))
    thread.join(60)
    assert not cleaned


def test_the_wait_for_a_call_can_be_interrupted_at_every_point() -> None:
    interrupted = InterruptedAtPoints("platform/deadline.py")

    def attempted() -> None:
        cleaned, go_on = threading.Event(), threading.Event()

        def wait() -> None:
            go_on.wait(60)

        try:
            interrupted.look(lambda: call_with_timeout(wait, 0.01, cleaned.set))
        except DeadlineExceededError:
            pass
        finally:
            go_on.set()

    interrupted(attempted, fewest=10)
