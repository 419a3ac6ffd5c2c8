"""Short runs of tasks, on the thread of their event loop: a few in each of its turns, as long as no others wait.

Handing such a run to a worker and being notified of its end takes longer than the run; moreover, the loop and the
workers then wait for the interpreter, and on a machine of few cores for a core. So requests stay in the queue although
a replica is idle, and the loop takes some from there in each turn.

Limits, order, timeouts, cancellation and closing are those of all requests in the queue. Workers serve them as soon as
others wait as well (a thread, another loop), a request is urgent, runs have become longer, the loop turns out to be
busy with other work, or the executor is drained.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from weakref import WeakMethod

from dagexec.executor.dispatch.dispatcher import Dispatcher
from dagexec.executor.dispatch.state import MAX_IN_TURN
from dagexec.executor.requests.request import Request
from dagexec.executor.requests.waiting import MAX_QUEUED, MAX_TURN, EventLoop
from dagexec.executor.runs.inline import AMPLE, InlineRuns
from dagexec.executor.runs.pooled import PooledRuns
from dagexec.platform.threads import threads


class Visits:
    """Decides which event loop to call for the requests that wait for its turns. It has no locks, calls or clock.

    Loops are interchangeable. Any thread may ask for a visit; the other events come from the thread of the loop.
    """

    __slots__ = ("_departure", "_due")

    def __init__(self) -> None:
        self._due: EventLoop | None = None  # the loop that will come, or is here
        self._departure: float | None = None  # when it left, with requests waiting

    def wanted(self, loop: EventLoop) -> bool:
        """Requests wait for `loop`. True when it has to be called."""
        if self._due is loop:
            return False
        self._due = loop
        return True

    def begins(self, now: float) -> bool:
        """The loop is here. False when that took so long that it must be busy."""
        departure, self._departure = self._departure, None
        return departure is None or now - departure <= MAX_TURN

    def is_over(self) -> None:
        """The loop leaves, or does not come. Look for waiting requests afterwards: later ones call it again."""
        self._due = None

    def comes_again(self, now: float) -> None:
        """The loop left although requests wait; it has to be called again."""
        self._departure = now

    def state(self, now: float) -> Hashable:
        """All that decides what comes next."""
        return self._due, None if self._departure is None else now - self._departure <= MAX_TURN


class Turns:
    """The turns of the event loops whose tasks call one executor."""

    def __init__(self, dispatcher: Dispatcher, pooled: PooledRuns, inline: InlineRuns) -> None:
        self._dispatcher = dispatcher
        self._state = dispatcher.state
        self._pooled = pooled
        self._inline = inline
        self._now = threads().monotonic
        self._visits = Visits()
        own = WeakMethod(self._call)  # no reference cycle: the dispatcher is freed with its last user

        def call(loop: EventLoop) -> None:
            visit = own()
            if visit is not None:
                visit(loop)

        dispatcher.call_loop = call

    def offer(self, request: Request) -> None:
        """Let the event loop run `request`, which a task is about to make, if it may."""
        call = request.call
        ample = call.timeout is None or call.timeout > AMPLE * MAX_IN_TURN
        plain = call.trace is None and not call.priority and ample
        if plain and self._inline.waits_for_nothing:
            request.loop = request.waits_on

    def _call(self, loop: EventLoop) -> None:
        """Call `loop`, from any thread."""
        if not self._visits.wanted(loop):
            return
        try:
            loop.call(partial(self._come, loop))
        except RuntimeError:  # it is closed
            self._visits.is_over()
            self._pooled.give_up_turns()

    def _come(self, loop: EventLoop) -> None:
        """On the thread of `loop`: run as many requests as this turn has time for, and come again for the rest."""
        try:
            if self._visits.begins(self._now()):
                self._run_some(loop)
            else:
                self._pooled.give_up_turns()
        finally:
            self._visits.is_over()
            if self._state.idle and self._state.queue.waiting:
                self._visits.comes_again(self._now())
                self._call(loop)

    def _run_some(self, loop: EventLoop) -> None:
        state = self._state
        while state.idle and state.queue.waiting:
            replica = state.idle[0]
            if not state.is_short(replica):
                self._pooled.give_up_turns()
                return
            assert replica.io_binding is not None
            if not loop.spend(min(replica.io_binding.seconds, MAX_QUEUED), MAX_QUEUED):
                return
            request = self._dispatcher.take_turn()
            if request is None:
                return
            try:
                if request.loop is loop and request.is_prepared:
                    self._pooled.run_here(request)
                else:
                    self._pooled.serve(request)
            except BaseException as error:  # Ctrl-C
                self._pooled.end_early(request, error)
                raise
