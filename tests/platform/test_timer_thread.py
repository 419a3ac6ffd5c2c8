"""The thread that makes calls when their time comes."""

from __future__ import annotations

import os
import threading

import pytest

from dagexec.platform.timer_thread import TimerThread

PATIENCE = 30
NEVER = 1e9


@pytest.fixture
def timers() -> TimerThread:
    return TimerThread()


def test_calls_are_made_in_the_order_of_their_times_by_one_thread(timers: TimerThread) -> None:
    made: list[tuple[str, int]] = []
    over = threading.Event()

    def note(name: str) -> None:
        made.append((name, threading.get_ident()))

    timers.call(NEVER, lambda: note("never"))
    timers.call(0.02, lambda: (note("last"), over.set()))
    timers.call(0.01, lambda: note("second"))
    timers.call(0.0, lambda: note("first"))
    assert over.wait(PATIENCE)
    assert [name for name, _ in made] == ["first", "second", "last"]
    assert len({thread for _, thread in made}) == 1


def test_a_cancelled_call_is_not_made_and_one_that_raises_stops_no_other(timers: TimerThread) -> None:
    made: list[str] = []
    over = threading.Event()
    timers.call(0.01, lambda: made.append("cancelled")).cancel()
    timers.call(0.01, lambda: 1 / 0)
    timers.call(0.01, over.set)
    assert over.wait(PATIENCE)
    assert made == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_makes_its_own_calls_and_none_of_the_parents(timers: TimerThread) -> None:
    timers.call(NEVER, lambda: None)  # its thread is there
    reading, writing = os.pipe()
    timers.call(0.05, lambda: os.write(writing, b"parent "))
    child = os.fork()
    if child == 0:
        over = threading.Event()
        timers.call(0.1, over.set)
        timers.call(0.0, lambda: os.write(writing, b"child "))
        os._exit(0 if over.wait(PATIENCE) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert sorted(os.read(reading, 100).split()) == [b"child", b"parent"]
    os.close(reading)
    os.close(writing)
