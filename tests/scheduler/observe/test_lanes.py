"""Lanes: what threads did lately, told to whoever looks, in memory that is bounded."""

from __future__ import annotations

import threading
from collections import defaultdict
from itertools import count
from random import Random

import pytest

from dagexec.scheduler.observe.lanes import KEPT_STRETCHES, PATIENCE_SECONDS, Lanes, Stretch
from dagexec.scheduler.run.fair_share import Share
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.run import Run, task

PATIENCE = 30


class Clock:
    """Stands until somebody moves it."""

    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


def test_what_comes_after_a_number_is_told() -> None:
    clock = Clock()
    lanes = Lanes(clock)
    lanes.add("one", 1.0, 1.5, "a", "net a")
    lanes.add("two", 1.0, 2.0, "b", "net b")
    latest, found = lanes.since(0)
    assert {name: [stretch[1:] for stretch in row] for name, row in found.items()} == {
        "one": [(1.0, 1.5, 0.5, 1, "a", "net a")],
        "two": [(1.0, 2.0, 1.0, 1, "b", "net b")],
    }
    assert lanes.since(latest) == (latest, {"one": [], "two": []})
    lanes.began("one", "b", "net b")
    clock.now += 3
    assert lanes.since(latest)[1]["one"] == [Stretch(latest, 10.0, None, 3.0, 1, "b", "net b")]
    lanes.ended("one")
    later, found = lanes.since(latest)
    assert found == {"one": [Stretch(later, 10.0, 13.0, 3.0, 1, "b", "net b")], "two": []}


def test_short_ones_in_a_row_are_one() -> None:
    lanes = Lanes(Clock())
    milliseconds = [(0, 0.5), (0.6, 0.9), (1.0, 1.9), (2.0, 2.1), (4.0, 4.1)]
    for start, end in milliseconds:
        lanes.add("one", start / 1e3, end / 1e3, "a", "net a")
    lanes.add("one", 4.2e-3, 4.3e-3, "b", "net b")
    found = [(one.start * 1e3, one.times, one.busy * 1e3, one.label) for one in lanes.since(0)[1]["one"]]
    expected = [(0, 3, 1.7, "a"), (2.0, 1, 0.1, "a"), (4.0, 1, 0.1, "a"), (4.2, 1, 0.1, "b")]
    assert [pytest.approx(one[:3]) for one in expected] == [one[:3] for one in found]
    assert [one[3] for one in expected] == [one[3] for one in found]


def test_memory_is_bounded_and_threads_that_are_gone_are_forgotten() -> None:
    clock = Clock()
    lanes = Lanes(clock)
    clock.now = float(KEPT_STRETCHES)
    for number in range(KEPT_STRETCHES + 7):
        lanes.add("one", number, number + 0.5, "a", "net a")
    lanes.have(["idle"])
    found = lanes.since(0)[1]
    assert (len(found["one"]), found["one"][0].start, found["idle"]) == (KEPT_STRETCHES, 7, [])
    clock.now += 20
    lanes.have(["idle"])
    clock.now = KEPT_STRETCHES + 50.0
    lanes.have(["idle"])
    assert lanes.since(0)[1] == {"idle": []}


def test_nothing_is_lost_between_threads_and_who_looks() -> None:
    """Threads add up what they added; a reader does, with what came since its last look, where a later one counts."""
    lanes, added = Lanes(Clock()), [0.0] * 4
    seen: dict[str, dict[float, Stretch]] = defaultdict(dict)
    done = threading.Event()

    def work(number: int) -> None:
        draw, at = Random(number), 0.0
        for _ in range(2000):
            at += draw.choice((1e-5, 1e-3))
            end = at + draw.choice((1e-4, 1e-3))
            lanes.add(str(number), at, end, draw.choice("ab"), "net")
            added[number] += end - at
            at = end

    def look() -> None:
        number = 0
        for _ in count():
            last = done.is_set()
            number, found = lanes.since(number)
            for name, row in found.items():
                seen[name].update((one.start, one) for one in row)
            if last:
                return

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    reader = threading.Thread(target=look)
    for thread in (reader, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    reader.join()
    for number in range(4):
        row = seen[str(number)].values()
        assert sum(one.times for one in row) == 2000
        assert sum(one.busy for one in row) == pytest.approx(added[number])


def test_workers_are_recorded_while_somebody_looks() -> None:
    clock = Clock()
    lanes, share = Lanes(clock), Share("own")

    def run(name: str, share: Share | None = None) -> None:
        done = threading.Event()
        one: Run = task(name, lambda: None, share=share)
        one.finished = done.set
        pool.submit(one)
        assert done.wait(PATIENCE)

    with WorkerPool(1, "pool") as pool:
        run("before")
        assert lanes.since(0) == (0, {})
        lanes.look()
        pool.watch(lanes, share, "mine")
        assert lanes.since(0) == (0, {"pool-0": []})
        run("first", share)
        run("second")
        run("third")  # so that the second has ended
        clock.now += PATIENCE_SECONDS
        run("fourth")
        run("fifth")
        number, found = lanes.since(0)
        run("sixth")
        run("seventh")
        assert lanes.since(0)[0] == number  # recording has stopped by itself
        told = [(one.label, one.doing) for one in found["pool-0"]]
        assert told[:3] == [("mine", "first"), ("second", "second"), ("third", "third")]
        lanes.look()
        pool.watch(lanes, share, "mine")
        run("again")
        run("last")
        assert [one.doing for one in lanes.since(number)[1]["pool-0"]][:1] == ["again"]
