"""Running one function on every rank of a group, each in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from dagexec.ops.families.communication import CommonWorld, ThreadGroup
from dagexec.platform.threads import threads

Result = TypeVar("Result")


def on_ranks(
    size: int, work: Callable[[CommonWorld], Result], *, timeout: float = 20.0, leave: bool = True
) -> list[Result | BaseException]:
    """What `work(world)` returns or raises on each rank. A rank that is done leaves the group."""
    group = ThreadGroup(size)
    ends: dict[int, Result | BaseException] = {}

    def run(world: CommonWorld) -> None:
        try:
            ends[world.rank] = work(world)
        except Exception as error:
            ends[world.rank] = error
        if leave:
            world.close()

    worlds = [group.join(rank, timeout) for rank in range(size)]
    started = [threads().start(partial(run, world), f"rank {world.rank}") for world in worlds]
    for thread in started:
        thread.join()
    return [ends[rank] for rank in range(size)]


def results_of(ends: list[Result | BaseException]) -> list[Result]:
    """The results, or the first error that is raised here."""
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    return ends  # type: ignore[return-value]
