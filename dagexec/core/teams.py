"""Teams: the threads that a library keeps for every thread that calls its operators of several threads.

libgomp lets an idle team spin, to be there for the next operator, while all teams together are no more than the cores;
beyond that they sleep, and each operator waits some 50 us until the system has woken its team. So no more threads than
need it keep a team: who is idle lets go of its own when another thread has one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

Wake = Callable[[], object]

_lock = threading.Lock()
_owners: dict[int, Wake | None] = {}  # by thread
_releases: list[Callable[[], object]] = []


def on_release(release: Callable[[], object]) -> None:
    """Have `release` called by a thread that is to let go of its team."""
    _releases.append(release)


def enter(wake: Wake | None = None) -> None:
    """The calling thread is about to call operators of several threads. Idle threads that have a team are woken.

    `wake` makes the calling thread call `leave_to_others` when it is idle; None for one that nobody can ask.
    """
    me = threading.get_ident()
    if me in _owners and len(_owners) == 1:
        return
    with _lock:
        alive = {thread.ident for thread in threading.enumerate()}
        for ident in [ident for ident in _owners if ident not in alive]:
            del _owners[ident]
        _owners[me] = wake
        others = [other for ident, other in _owners.items() if ident != me and other is not None]
    for other in others:
        other()


def leave_to_others() -> None:
    """The calling thread is idle: it lets go of its team, if it has one and so does another thread."""
    me = threading.get_ident()
    if me not in _owners or len(_owners) == 1:
        return
    leave()


def leave() -> None:
    """The calling thread lets go of its team, if it has one."""
    with _lock:
        _owners.pop(threading.get_ident(), None)
    for release in _releases:
        release()


def _forked() -> None:
    global _lock
    _lock = threading.Lock()
    _owners.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
