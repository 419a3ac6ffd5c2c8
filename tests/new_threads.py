"""How many threads a test has started: those of earlier tests may end while it counts."""

from __future__ import annotations

import threading
from collections.abc import Callable


def new_threads() -> Callable[[], int]:
    """Counts, when it is called, the threads that there are and were not before."""
    before = set(threading.enumerate())
    return lambda: len(set(threading.enumerate()) - before)
