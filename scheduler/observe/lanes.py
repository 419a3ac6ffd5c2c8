"""Lanes: what threads did in the last seconds, for somebody who looks on.

Who looks says so every time (`look`). Where nobody has for some seconds, those that record stop by themselves.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from dagexec.platform.locks import new_lock

PATIENCE_SECONDS = 10.0
"""For how long after a look there may be another."""

KEPT_STRETCHES = 5000
"""Of each lane; of a busy one, those of ten seconds."""

_SHORT = 1e-3  # seconds: stretches of the same, so close to each other, are joined, up to twice as long
_FORGOTTEN_SECONDS = 30.0  # after which the lane of a thread that is gone is, too


class Stretch(NamedTuple):
    """A time in which a thread worked for one user; several short ones in a row are one.

    Attributes:
        number: later than all that were there, or changed, before.
        start, end: seconds of the clock; `end` is None while it goes on.
        busy: seconds of it in which the thread was at work.
        times: how many were joined.
        label: the user's name.
        doing: what it did for that.
    """

    number: int
    start: float
    end: float | None
    busy: float
    times: int
    label: str
    doing: str


class _Lane:
    """Of one thread."""

    __slots__ = ("began", "seen", "stretches")

    def __init__(self, now: float) -> None:
        self.stretches: deque[Stretch] = deque(maxlen=KEPT_STRETCHES)
        self.began: tuple[float, str, str] | None = None
        self.seen = now


class Lanes:
    """The lanes of several threads, which add to them at the same time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """The `clock` is that of the times that are added."""
        self._clock = clock
        self._lock = new_lock()
        self._lanes: dict[str, _Lane] = {}
        self._number = 0
        self._looked = float("-inf")

    def look(self) -> None:
        """Somebody looks, and may do so again in `PATIENCE_SECONDS`."""
        self._looked = self._clock()

    @property
    def is_watched(self) -> bool:
        """Whether somebody has looked lately."""
        return self._clock() - self._looked < PATIENCE_SECONDS

    def have(self, names: Iterable[str]) -> None:
        """There are threads of these names, even if they do nothing."""
        with self._lock:
            for name in names:
                self._lane(name).seen = self._clock()

    def began(self, name: str, label: str, doing: str) -> None:
        """A thread begins to work for `label`, until it has `ended`."""
        with self._lock:
            self._lane(name).began = self._clock(), label, doing

    def ended(self, name: str) -> None:
        """It has ended what it had begun last."""
        with self._lock:
            lane = self._lane(name)
            if lane.began is not None:
                (start, label, doing), lane.began = lane.began, None
                self._add(lane, start, self._clock(), label, doing)

    def add(self, name: str, start: float, end: float, label: str, doing: str) -> None:
        """A thread has worked for `label`."""
        with self._lock:
            self._add(self._lane(name), start, end, label, doing)

    def since(self, number: int) -> tuple[int, dict[str, list[Stretch]]]:
        """The latest number, and by thread the stretches that came or changed after `number`, which is an earlier one.

        What goes on is told each time, as the last of its lane, with the latest number.
        """
        now = self._clock()
        with self._lock:
            self._lanes = {name: one for name, one in self._lanes.items() if now - one.seen < _FORGOTTEN_SECONDS}
            found: dict[str, list[Stretch]] = {}
            for name, lane in sorted(self._lanes.items()):
                later = found[name] = []
                for stretch in reversed(lane.stretches):
                    if stretch.number <= number:
                        break
                    later.append(stretch)
                later.reverse()
                if lane.began is not None:
                    start, label, doing = lane.began
                    later.append(Stretch(self._number, start, None, now - start, 1, label, doing))
            return self._number, found

    def _lane(self, name: str) -> _Lane:
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = _Lane(self._clock())
        return lane

    def _add(self, lane: _Lane, start: float, end: float, label: str, doing: str) -> None:
        self._number += 1
        lane.seen = end
        busy, times = end - start, 1
        if lane.stretches:
            last = lane.stretches[-1]
            assert last.end is not None
            joins = start - last.end < _SHORT and end - last.start < 2 * _SHORT
            if joins and last.label == label and last.doing == doing:
                lane.stretches.pop()
                start, busy, times = last.start, last.busy + busy, last.times + 1
        lane.stretches.append(Stretch(self._number, start, end, busy, times, label, doing))
