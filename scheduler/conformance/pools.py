"""PoolStory: what a pool does around its runs: whom it wakes, which run a worker enters, and whether it holds its lock.

The roster is the machine here: it says which worker to wake and which run is next, and the pool has to obey.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from dagexec.scheduler.conformance.story import Deviation
from dagexec.scheduler.run.run import Run

_KEPT = 40


class PoolStory:
    """Records each action of a pool; `deviations` are those that the roster does not allow.

    Attributes:
        next_run: the run that the roster has just named as the next.
    """

    def __init__(self, is_locked: Callable[[], bool]) -> None:
        """`is_locked` says whether the calling thread holds the pool's lock."""
        self.deviations: list[Deviation] = []
        self.next_run: Run | None = None
        self._is_locked = is_locked
        self._events: list[str] = []
        self._to_wake: dict[str, str] = {}  # by the thread that is to wake them

    def happens(self, what: str, unattended: str = "") -> None:
        """The calling thread does something that needs the lock.

        `unattended` names the net of a run with work left that no worker would notice.
        """
        me = threading.current_thread().name
        self._events.append(f"{me}: {what}")
        del self._events[:-_KEPT]
        if not self._is_locked():
            self._deviates("that is done with the pool's lock, which this thread does not hold")
        if me in self._to_wake:
            self._deviates(f"{me} has taken {self._to_wake.pop(me)} from those that sleep, and is to wake it first")
        if unattended:
            self._deviates(
                f"net {unattended!r} has something to do: who left it was to list it, so that others find it"
            )

    def begins(self, worker: str, run: Run) -> None:
        """A worker enters the run that is next."""
        expected = self.next_run
        if expected is not run:
            right = "none" if expected is None else f"net {expected.name!r}"
            self._events.append(f"{worker}: goes into net {run.name!r}")
            self._deviates(f"the next run is {right}")

    def is_to_wake(self, worker: str) -> None:
        """The calling thread picks a sleeping worker to wake."""
        me = threading.current_thread().name
        self.happens(f"{worker} is taken from those that sleep")
        self._to_wake[me] = worker

    def wakes(self, worker: str) -> None:
        """The calling thread wakes a worker."""
        me = threading.current_thread().name
        self._events.append(f"{me}: wakes {worker}")
        if self._to_wake.get(me) == worker:
            del self._to_wake[me]

    def rests(self) -> None:
        """No thread can go on."""
        for waker, sleeper in self._to_wake.items():
            self._events.append("nothing happens any more")
            self._deviates(f"{waker} has taken {sleeper} from those that sleep, and wakes it")

    def _deviates(self, right: str) -> None:
        self.deviations.append(Deviation("pool", self._events[-1], right, self._events[:-1]))
