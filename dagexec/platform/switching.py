"""How long a thread that computes in Python makes others wait for the interpreter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dagexec.platform.locks import new_lock

SECONDS = 0.0005
"""Instead of Python's 5 ms; another thread that wants the interpreter gets it after this."""

_lock = new_lock()
_before: list[float] = []  # what each block that is open found


@contextmanager
def quick_switching() -> Iterator[None]:
    """Within the block, which may be open in several threads, threads of Python take turns every `SECONDS`.

    For work in the background of an event loop. At the end of the last block the interval is what it was before the
    first, unless somebody else has set it meanwhile.
    """
    with _lock:
        _before.append(sys.getswitchinterval())
        if _before[0] > SECONDS:
            sys.setswitchinterval(SECONDS)
    try:
        yield
    finally:
        with _lock:
            last = len(_before) == 1
            found = _before.pop()
            if last and found > SECONDS and abs(sys.getswitchinterval() - SECONDS) < SECONDS / 100:
                sys.setswitchinterval(found)
