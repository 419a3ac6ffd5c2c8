"""Every state of small worlds around the dispatcher's machine, and the mistakes in it that these find."""

from __future__ import annotations

import pytest

from dagexec.executor.batching.queue import BatchQueue
from dagexec.executor.dispatch import ledger, state
from dagexec.executor.dispatch.keeping import KeptReplicas
from dagexec.executor.dispatch.ledger import Ledger
from dagexec.executor.dispatch.state import DispatchState
from dagexec.executor.requests import queue
from dagexec.executor.requests.queue import RequestQueue
from dagexec.executor.runs.turns import Visits
from dagexec.options import CompileOptions
from tests.machines.dispatch_world import Kind, Setting
from tests.machines.worlds import searched, with_other_futures
from tests.planted.bug import Edit, edited

PLAIN = Kind()
JOINED = Kind(group="g")
THREAD, OTHER_THREAD = Kind(thread=1), Kind(thread=2)


def joining(max_wait: float = 2, max_batch: int = 2, max_queued: int | None = None) -> CompileOptions:
    return CompileOptions(max_batch=max_batch, max_wait=max_wait, max_queued=max_queued)


SMALL = {
    "a queue": Setting(1, (PLAIN, PLAIN, PLAIN, Kind(priority=1)), cancels=False),
    "a queue that waits": Setting(1, (PLAIN, PLAIN, PLAIN, Kind(timeout=1)), CompileOptions(max_queued=1)),
    "a queue that rejects": Setting(
        1, (PLAIN, PLAIN, Kind(priority=1)), CompileOptions(max_queued=1, when_full="reject"), added=1
    ),
    "closing": Setting(1, (PLAIN, PLAIN, PLAIN), CompileOptions(max_queued=1), closes=True),
    "warm-up": Setting(2, (PLAIN, PLAIN, Kind(pinned=True))),
    "preparation": Setting(1, (PLAIN, PLAIN), prepares=True, fails=True),
    "threads": Setting(1, (THREAD, THREAD, PLAIN), returns=(1,), cancels=False),
    "joining": Setting(1, (JOINED, JOINED, PLAIN), joining(), cancels=False),
    "joining in time": Setting(1, (JOINED, JOINED._replace(timeout=1)), joining(max_batch=3)),
    "joining what failed": Setting(1, (PLAIN, JOINED, JOINED), joining(0), fails=True),
    "joining rows": Setting(1, (PLAIN, JOINED, Kind(group="g", rows=2)), joining(), cancels=False),
    "turns": Setting(2, (Kind(loop="a"), Kind(loop="a"), PLAIN), cancels=False),
}

LARGE = {
    "a queue that waits for two": Setting(
        2, (PLAIN, PLAIN, Kind(timeout=1), Kind(priority=1)), CompileOptions(max_queued=1)
    ),
    "closing while one more is made": Setting(
        2, (PLAIN, PLAIN, Kind(timeout=2), Kind(pinned=True)), CompileOptions(max_queued=0), added=1, closes=True
    ),
    "preparation beside": Setting(2, (PLAIN, PLAIN, Kind(timeout=1)), prepares=True, fails=True, closes=True),
    "threads that are not known": Setting(1, (THREAD, THREAD, OTHER_THREAD, PLAIN)),
    "threads and a warm-up": Setting(1, (THREAD, PLAIN, Kind(pinned=True)), returns=(1,), closes=True),
    "threads that are not known and a warm-up": Setting(
        1, (THREAD, OTHER_THREAD, OTHER_THREAD, Kind(pinned=True)), closes=True
    ),
    "joining by priority": Setting(2, (JOINED, JOINED, Kind(group="g", priority=1), PLAIN), joining(), fails=True),
    "joining in a full queue": Setting(
        1, (JOINED, JOINED, Kind(group="h"), Kind(group="g", rows=2)), joining(max_queued=1), closes=True
    ),
    "joining three beside": Setting(2, (JOINED, JOINED, JOINED, PLAIN, THREAD), joining(0), fails=True),
    "joining beside": Setting(2, (PLAIN, JOINED, JOINED, THREAD), joining(0), fails=True, cancels=False),
    "joining beside another": Setting(1, (PLAIN, JOINED, JOINED, THREAD), joining(0), 1, fails=True, cancels=False),
    "joining for a thread that Ctrl-C may come to": Setting(
        1, (JOINED._replace(starts=False),) * 3 + (Kind(starts=False),), joining(), closes=True
    ),
    "turns that are given up": Setting(2, (Kind(loop="a"), Kind(loop="a"), PLAIN)),
    "turns of two loops": Setting(2, (Kind(loop="a"), Kind(loop="a"), Kind(loop="b"), PLAIN)),
    "turns, closed": Setting(1, (Kind(loop="a"), Kind(loop="a"), Kind(priority=1)), closes=True),
}
WORLDS = SMALL | LARGE


@pytest.mark.parametrize("name", SMALL)
def test_nothing_goes_wrong_in_a_small_world(name: str) -> None:
    found = searched(SMALL[name].world)
    assert (found.fault, found.path) == (None, ())
    assert found.exhausted


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_nothing_goes_wrong_in_a_larger_world(name: str) -> None:
    found = searched(LARGE[name].world, seconds=10)
    assert (found.fault, found.path) == (None, ())


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_what_has_one_state_has_one_future(name: str) -> None:
    assert with_other_futures(LARGE[name].world, 150) == []


def test_nobody_is_overtaken_more_often_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MAX_OVERTAKEN", 1)
    setting = Setting(1, (PLAIN, PLAIN, Kind(priority=1), Kind(priority=1)), cancels=False)
    assert searched(setting.world).holds


def test_who_comes_alone_after_others_did_does_not_wait_and_nothing_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ledger, state):
        monkeypatch.setattr(module, "ALONE_AGAIN", 1)
    assert searched(Setting(1, (JOINED, JOINED, THREAD), joining(), cancels=False).world).holds


MISTAKES = {
    "who gives up lets nobody in": (
        "a queue that waits", "somebody awaits admission although there is room",
        Edit(DispatchState.withdraw, "        self._admit()\n", "        pass\n"),
    ),
    "who is served lets nobody in": (
        "closing", "somebody awaits admission although there is room",
        Edit(DispatchState._next, "        self._admit()\n        return queued", "        return queued"),
    ),
    "who gives up stays in the queue": (
        "a queue that waits", "a request is lost, or in two places",
        Edit(DispatchState.withdraw, "        request.queue.remove(request)\n", ""),
    ),
    "a replica is given twice": (
        "a queue that waits", "a replica is lost, or in two places",
        Edit(DispatchState.arrive, "del self.idle[0]\n            return request", "return request"),
    ),
    "a replica that nobody needs is forgotten": (
        "a queue that waits", "a replica is lost, or in two places",
        Edit(DispatchState._give, "self.idle.append(replica)", "pass"),
    ),
    "a free replica is not given to who waits": (
        "a queue", "somebody waits for ever",
        Edit(DispatchState._give, "self._next(replica, now)", "None"),
    ),
    "the queue minds no limit": (
        "a queue that waits", "the queue is longer than it may be",
        Edit(DispatchState._admit, "or len(self.queue) >= (self._options.max_queued or 0)", ""),
    ),
    "the queue minds no priority": (
        "a queue", "() is served before (priority=1)",
        Edit(RequestQueue.push, "(-request.call.priority, place, request)", "(0, place, request)"),
    ),
    "equal ones go in no order": (
        "a queue", "() is served before ()",
        Edit(RequestQueue.push, "call.priority, place, request)", "call.priority, -place, request)"),
    ),
    "who awaits admission is left behind": (
        "closing", "somebody awaits admission although nobody comes in any more",
        Edit(DispatchState.shut_down, "self._end_waiting(now, self.awaiting_admission)", "[]"),
    ),
    "those who wait for a certain replica do not count": (
        "threads and a warm-up", "the end is announced while somebody waits",
        Edit(vars(Ledger)["is_empty"].fget, "(self.running or self.unfinished)", "(self.running or self.queue)"),
    ),
    "a request that was given up ends once more": (
        "preparation", "a request ends twice",
        Edit(DispatchState.end, "        if request.over:\n            return ()\n", ""),
    ),
    "a run that is given up goes on": (
        "preparation", "a run that nobody waits for is not stopped",
        Edit(DispatchState.cancel, "if run is None else", "if True else"),
    ),
    "a kept replica is taken back and left": (
        "threads", "a replica is lost, or in two places",
        Edit(KeptReplicas.take_back, "self.by_thread.pop(thread)", "self.by_thread[thread]"),
    ),
    "a kept replica is idle as well": (
        "threads", "a replica is lost, or in two places",
        Edit(DispatchState._keeps, "        return nobody", "        self.idle.append(replica)\n        return nobody"),
    ),
    "an inline run that is over gives its replica to nobody": (
        "threads", "somebody waits for ever",
        Edit(DispatchState.leave_inline, "self.queue.waiting or self.awaiting", "self.awaiting"),
    ),
    "those who run again do not count when an inline run is over": (
        "joining beside", "somebody waits for a replica although one is idle",
        Edit(DispatchState.leave_inline, " or self.again.waiting", ""),
    ),
    "who comes goes before those who run again": (
        "joining beside another", "somebody is served before those that run again",
        Edit(DispatchState.arrive_inline, "self.queue.waiting or self.again.waiting", "self.queue.waiting"),
    ),
    "a member of a joined run that failed does not run again": (
        "joining what failed", "a request is lost, or in two places",
        Edit(DispatchState._run_again, "                self.again.push(member)\n", ""),
    ),
    "more is joined than may be": (
        "joining rows", "requests are joined that may not be",
        Edit(BatchQueue._joining, "            if room < 0:\n                break\n", ""),
    ),
    "who joins is taken and stays": (
        "joining", "a request is lost, or in two places",
        Edit(BatchQueue.pop_batch, "            self.remove(request)\n", "            pass\n"),
    ),
    "a timer that rings is not the right one": (
        "joining", "somebody waits for ever",
        Edit(DispatchState.rings, "self.timer_due != due", "True"),
    ),
    "the youngest of a group says when it is due": (
        "joining in time", "somebody waits in the queue although a replica is idle",
        Edit(BatchQueue._due, "iter(group.requests)", "reversed(group.requests)"),
    ),
    "who needs no company goes before those whose time has come": (
        "joining", "() is served before (group=g)",
        Edit(DispatchState._goes_first, " or self.queue.is_ready(now, self._hurried())", ""),
    ),
    "who waits for no turn goes before those who wait": (
        "turns", "is served before",
        Edit(DispatchState._goes_first, "self.queue.waiting or ", ""),
    ),
    "a loop that leaves looks who waits before it is gone": (
        "turns", "somebody waits",
        Edit(Visits.is_over, "        self._due = None\n", ""),
    ),
    "those who waited for a loop wait for it when nobody does any more": (
        "turns", "the machine fails: KeyError",
        Edit(RequestQueue.forget_loops, "        self.loops = {None: len(self.waiting)}", "        _ = {}"),
    ),
}  # fmt: skip


LATER = {
    "those who wait for a certain replica do not count",
    "who comes goes before those who run again",
    "those who run again do not count when an inline run is over",
}
"""Those found after so many states that it takes a while."""


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one in LATER)) for one in MISTAKES])
def test_a_mistake_in_the_machine_is_found(name: str) -> None:
    world, fault, mistake = MISTAKES[name]
    with edited((mistake,)):
        found = searched(WORLDS[world].world)
    assert found.fault is not None
    assert fault in found.fault
