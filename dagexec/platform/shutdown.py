"""The end of the process: who works is stopped, and waited for, while Python still runs.

Python ends a daemon thread when it next asks for the interpreter. Native code that it is in continues meanwhile, beside
the end of its libraries: OpenBLAS waits forever for a thread of its own when a product is under way at that moment.
So runs stop before their next operator, workers end, and a daemon thread that asks for another run is held until the
process is gone, as it would be a moment later.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from dagexec.platform.deadline import Deadline

logger = logging.getLogger("dagexec")

_Owner = TypeVar("_Owner")
Wait = Callable[[Deadline], object]
"""Waits for what was stopped, until a deadline at most."""
Stop = Callable[[_Owner], Wait]
"""Stops what an owner does, waiting for nobody."""

MAX_WAIT = 5.0
"""Seconds that the end of the process waits for operators that are under way."""

_stops: dict[object, tuple[weakref.ref[object], Stop[object]]] = {}
_ending = False


def stop_at_exit(owner: _Owner, stop: Stop[_Owner]) -> None:
    """At the end of the process, if `owner` lives, call `stop(owner)`, and, when all were stopped, what that gives."""
    key = object()
    # as in `forking`: the callback is no function of Python
    _stops[key] = weakref.ref(owner, partial(_stops.pop, key)), stop  # type: ignore[assignment]


def hold_daemon() -> None:
    """While the process ends, a daemon thread does not return from here."""
    if _ending and threading.current_thread().daemon:
        threading.Event().wait()


def _end() -> None:
    global _ending
    _ending = True
    deadline = Deadline(MAX_WAIT)
    waits: list[Wait] = []
    for reference, stop in _stops.copy().values():
        owner = reference()
        if owner is not None:
            waits.append(stop(owner))
    for wait in reversed(waits):  # who was made last works on what was made before
        wait(deadline)
    if deadline.is_over:
        logger.warning("the process ends beside operators that take more than %g s", MAX_WAIT)


atexit.register(_end)
