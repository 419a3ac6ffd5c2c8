"""One thread in place of a team: the kernels and primitives of a net that leaves the other cores to other runs.

Everything is chosen as for the team that the operator was given, then made for the calling thread. Kernels divide what
they compute among threads, not the sums, and so do a library's implementations, or are known not to
(`ops/onednn/division.py`): so one of the same name gives the same bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class NoSingleThreadError(Exception):
    """There is the implementation that a team would use, but not for one thread."""


class _Here(threading.local):
    alone = False


_here = _Here()


def is_alone() -> bool:
    """True while the calling thread prepares for one thread."""
    return _here.alone


@contextmanager
def one_thread(alone: bool = True) -> Iterator[None]:
    """What the calling thread prepares inside is for one thread; with False, for as many as the operator has."""
    before, _here.alone = _here.alone, alone
    try:
        yield
    finally:
        _here.alone = before
