"""What the dispatcher's machine decides is carried out: a request that has a replica is begun there, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest

import dagexec
from dagexec.binding.replicas import Replica
from dagexec.core.operator import nothing_to_do
from dagexec.errors import DagexecError
from dagexec.executor.dispatch.dispatcher import Dispatcher
from dagexec.executor.dispatch.state import DispatchState
from dagexec.executor.requests.request import Request
from dagexec.executor.runs.pooled import PooledRuns
from dagexec.platform.threads import threads
from dagexec.scheduler.exploration import explore_seeds
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.run.run import Run
from tests.planted.bug import Bug, Edit, planted
from tests.scheduler.scenarios import DIAMOND, X, sums

CALLERS = 4


class Watch:
    """What dispatchers decide, and what is done; each where the dispatcher's lock is held.

    Attributes:
        wrong: what was done otherwise.
        begun: how many requests were begun.
    """

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.begun = 0
        self._has: dict[Replica, Request] = {}
        self._blocks: dict[Request, int] = {}
        self._nets: dict[Run, BaseNet] = {}

    def assigned(self, replica: Replica, request: Request) -> None:
        """It is to be served there."""
        if replica in self._has:
            self.wrong.append(f"replica {replica.number} is given to a second request")
        self._has[replica] = request
        self._blocks[request] = 0

    def made(self, net: BaseNet, run: Run) -> None:
        """A run of the net of a replica."""
        self._nets[run] = net

    def started(self, request: Request, run: Run) -> None:
        """It is begun, unless this is a task that is to begin it."""
        if run not in self._nets:
            return
        self.begun += 1
        replica = request.replica
        if replica is None or self._has.get(replica) is not request:
            self.wrong.append("a request is begun that has no replica")
        elif self._nets[run] is not replica.net:
            self.wrong.append(f"a request that has replica {replica.number} is begun on another")
        elif self._blocks[request] != request.block:
            self.wrong.append(f"block {request.block} of a request is begun, and {self._blocks[request]} is next")
        else:
            self._blocks[request] += 1

    def released(self, request: Request) -> None:
        """Its replica is free."""
        assert request.replica is not None
        self.left(request.replica, request)
        by_pool = not request.caller and request.run_net and request.cancelled is None
        if by_pool and not self._blocks.pop(request, 1):
            self.wrong.append("a request ends that was never begun")

    def left(self, replica: Replica, request: Request) -> None:
        """Nobody has the replica now."""
        if self._has.pop(replica, None) is not request:
            self.wrong.append("a replica is let go by another request than has it")


@contextmanager
def watching() -> Iterator[Watch]:
    """Within it, dispatchers are watched."""
    watch = Watch()
    assign, release, started, new_run = DispatchState.assign, DispatchState.release, Dispatcher.started, BaseNet.new_run
    arrive_inline, leave_inline = DispatchState.arrive_inline, DispatchState.leave_inline

    def assigned(state: DispatchState, replica: Replica, request: Request, now: float) -> None:
        watch.assigned(replica, request)
        assign(state, replica, request, now)

    def released(state: DispatchState, request: Request, now: float) -> Request | None:
        watch.released(request)
        return release(state, request, now)

    def arrived(state: DispatchState, request: Request, *rest: Any) -> bool:
        found = arrive_inline(state, request, *rest)
        if found:
            assert request.replica is not None
            watch.assigned(request.replica, request)
        return found

    def left(state: DispatchState, request: Request, *rest: Any) -> bool:
        replica = request.replica
        found = leave_inline(state, request, *rest)
        if replica is not None and request.replica is None:
            watch.left(replica, request)
        return found

    def begun(dispatcher: Dispatcher, request: Request, run: Run) -> DagexecError | None:
        watch.started(request, run)
        return started(dispatcher, request, run)

    def made(net: BaseNet, *arguments: object, **named: object) -> Run:
        run = new_run(net, *arguments, **named)  # type: ignore[arg-type]
        watch.made(net, run)
        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DispatchState, "assign", assigned)
        patch.setattr(DispatchState, "release", released)
        patch.setattr(DispatchState, "arrive_inline", arrived)
        patch.setattr(DispatchState, "leave_inline", left)
        patch.setattr(Dispatcher, "started", begun)
        patch.setattr(BaseNet, "new_run", made)
        yield watch


def serve(call_all: Callable[[list[Callable[[], object]]], object]) -> int:
    """More callers than replicas, with a deadline for some. How many requests were begun; AssertionError, on which."""
    with (
        watching() as watch,
        dagexec.compile(sums(DIAMOND), num_workers=2, replicas=2, net_type="dag", optimize=False) as executor,
    ):

        def call(number: int) -> None:
            for timeout in (None, 1e-4 if number % 2 else None):
                with suppress(DagexecError):
                    executor.run({"x": X}, timeout=timeout, priority=number % 2)

        call_all([partial(call, number) for number in range(CALLERS)])
    assert not watch.wrong, watch.wrong
    return watch.begun


def under_a_schedule() -> int:
    def call_all(calls: list[Callable[[], object]]) -> None:
        for thread in [threads().start(call, f"caller {number}") for number, call in enumerate(calls)]:
            thread.join()

    return serve(call_all)


def test_under_schedules_a_request_is_begun_once_on_the_replica_that_it_has() -> None:
    explore_seeds(under_a_schedule, range(7)).raise_failure()


def test_in_threads_a_request_is_begun_once_on_the_replica_that_it_has() -> None:
    with ThreadPoolExecutor(CALLERS) as pool:
        begun = sum(serve(lambda calls: [one.result() for one in map(pool.submit, calls)]) for _ in range(5))
    assert begun > 5


MISTAKES = {
    "begun on another": Edit(
        PooledRuns._start, "self._begun(request, replica, ", "self._begun(request, self._dispatcher.state.replicas[0], "
    ),
    "given to a second request": Edit(
        DispatchState._give,
        "self.assign(replica, following, now)",
        "self.assign(replica, following, now)\n            self.idle.append(replica)",
    ),
    "is next": Edit(
        PooledRuns._start,
        "        self.feed(request)\n",
        "        self.feed(request)\n        self._begun(request, replica, lambda: None)\n",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_request_that_is_not_carried_out_as_it_is_decided_is_noticed(mistake: str) -> None:
    bug = Bug(mistake, "dispatch", "", (MISTAKES[mistake],), nothing_to_do, "schedules", "")
    with planted(bug):
        found = explore_seeds(under_a_schedule, range(20))
    assert found.failed is not None
    assert mistake in str(found.failed.failure)
