"""Python's collector of cycles, at rest while very many objects are made that stay.

It goes through what is new after every 700 new objects, and through everything once that has grown by a quarter. While
a net is compiled nearly everything stays, so that a quarter of the time was spent on finding nothing.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_resting = [0]  # how many ask for it


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Within it no cycles are collected, in any thread; not for what may run long or throws large arrays away.

    Where the collector is switched off anyway nothing changes.
    """
    with _lock:
        if not _resting[0] and not gc.isenabled():
            mine = False
        else:
            mine = True
            _resting[0] += 1
            gc.disable()
    try:
        yield
    finally:
        if mine:
            with _lock:
                _resting[0] = max(0, _resting[0] - 1)
                if not _resting[0]:
                    gc.enable()


def _forked() -> None:
    global _lock
    _lock = threading.Lock()
    if _resting[0]:  # those who asked are threads of the parent, or this one, which switches it on again once more
        _resting[0] = 0
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
