"""A cached property: computed once by a thread, and one object for those that ask at the same time."""

from __future__ import annotations

import threading

from dagexec.platform.cached import cached_property


class Counted:
    """How often, and in what threads."""

    def __init__(self, barrier: threading.Barrier | None = None) -> None:
        self.barrier, self.times = barrier, 0

    @cached_property
    def content(self) -> list[int]:
        """What is computed."""
        self.times += 1
        if self.barrier is not None:
            self.barrier.wait(30)
        return []


def test_it_is_computed_once_and_may_be_forgotten() -> None:
    counted = Counted()
    assert counted.content is counted.content
    assert counted.times == 1
    first = counted.__dict__.pop("content")
    assert counted.content is not first
    assert Counted.content.__doc__ == "What is computed."


def test_threads_that_compute_at_the_same_time_are_given_one_object() -> None:
    counted = Counted(threading.Barrier(2))
    results: list[list[int]] = []
    threads = [threading.Thread(target=lambda: results.append(counted.content)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted.times == 2
    assert results[0] is results[1] is counted.content
