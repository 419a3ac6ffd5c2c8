"""Teams: the threads that a library keeps for every thread that calls its operators of several threads.

libgomp lets an idle team spin, to be there for the next operator, while all teams together are no more than the cores;
beyond that they sleep, and each operator waits some 50 us until the system has woken its team. So no more threads than
need it keep a team: who is idle releases its own when another thread has one.

Where an idle thread of a team sleeps it has to be woken for the next operator, and some kernels put it on the core of
its waker then, although another core is idle: from time to time wherever other processes compute a little, and for
many milliseconds, in which the team computes on one core. So its other threads are kept off the core of the thread
whose team it is (`keep_off`).

libgomp ends the process when it cannot make a thread. So before it makes a team, as many threads are made and ended
(`require`): the C library keeps their stacks for the next ones.

A team does not survive a fork: in the child, the thread that forked would wait for it forever. So it releases its
team before, and parent and child make one of their own when they next need one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from dagexec.errors import ResourceError
from dagexec.platform.host_memory import check_room

Wake = Callable[[], object]
Restrict = Callable[[int, set[int]], object]

_lock = threading.Lock()
_owners: dict[int, Wake | None] = {}  # by thread
_releases: list[Callable[[], object] | None] = []
_restricts: list[Restrict] = []
_parted = False  # the thread that is about to fork has let go of its team
_stranded = False


def on_release(release: Callable[[], object] | None) -> None:
    """Have `release` called by a thread that is to let go of its team; None: it cannot."""
    _releases.append(release)


def on_restrict(restrict: Restrict) -> None:
    """Have `restrict` called by a thread whose team's other threads are to compute on other cores.

    It is told of how many threads the team is, and the cores.
    """
    _restricts.append(restrict)


class _Here(threading.local):
    """What the team of a thread was told last: off which core, with how many threads; and how many it can have."""

    core = -1
    threads = 0
    possible = 1


_here = _Here()


def keep_off(core: int, threads: int) -> None:
    """Have the other threads of the calling thread's team, `threads` with it, compute elsewhere than on `core`.

    Nothing is done where it was told so before, and where that leaves fewer cores than other threads.
    """
    if (core == _here.core and threads <= _here.threads) or _stranded:
        return
    _here.core, _here.threads = core, threads
    others = os.sched_getaffinity(0) - {core}
    if len(others) >= threads - 1:
        for restrict in _restricts:
            restrict(threads, others)


def require(threads: int) -> None:
    """The calling thread is about to call operators of up to `threads` threads.

    Raises ResourceError where the system has no room for them. Takes a tenth of a microsecond when they are there.
    """
    if threads <= _here.possible or _stranded:
        return
    what = f"a team of {threads} threads"
    over = threading.Event()
    others: list[threading.Thread] = []
    try:
        for _ in range(threads - 1):
            other = threading.Thread(target=over.wait, name="dagexec-trial", daemon=True)
            other.start()
            others.append(other)
    except RuntimeError as error:
        raise ResourceError(f"{what}: the system could only start {len(others)} more: {error}") from None
    finally:
        over.set()
        for other in others:
            other.join()
    check_room(what)
    _here.possible = threads


def stranded() -> bool:
    """True in a child made by a fork that left the team of its thread behind: no operator can have several threads.

    That is a fork by native code which runs none of Python's hooks before it, or a library that keeps teams for good.
    """
    return _stranded


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
    """The calling thread is idle: it releases its team, if it has one and so does another thread."""
    me = threading.get_ident()
    if me not in _owners or len(_owners) == 1:
        return
    leave()


def leave() -> None:
    """The calling thread releases its team, if it has one."""
    _here.core, _here.possible = -1, 1
    _owners.pop(threading.get_ident(), None)  # one step, as whoever holds the lock may be about to fork
    if _stranded:
        return  # there is no team to wait for
    for release in _releases:
        if release is not None:
            release()


def _before_fork() -> None:
    global _parted
    leave()
    _parted = True


def _in_parent() -> None:
    global _parted
    _parted = False


def _in_child() -> None:
    global _lock, _parted, _stranded
    _stranded = _stranded or (bool(_releases) and (not _parted or None in _releases))
    _parted = False
    _lock = threading.Lock()
    _owners.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
