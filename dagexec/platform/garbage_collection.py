"""Python's collector of cycles, at rest while very many objects are made that stay.

It goes through what is new after every 700 new objects, and through everything once that has grown by a quarter. While
a net is compiled nearly everything stays, so that a quarter of the time was spent on finding nothing.

What was made meanwhile is old at the end. Otherwise the next collection, in whichever thread comes by, would go through
all of it at once while no other thread has the interpreter: 3 to 6 ms after a small net.
"""

from __future__ import annotations

import gc
import os
import threading

MAX_MADE_OLD = 100_000
"""New objects after which no more are made old until everything was collected: Python does that for what grew old."""

FROZEN_BY_PYTHON = 1000
"""Python 3.12 starts with a few hundred frozen objects of its own."""

_lock = threading.Lock()
_resting = [0]  # how many ask for it
_made_old = {"collections": 0, "objects": 0}  # of everything so far; since the last one
_freezes = [False]  # whether the application was seen to freeze objects


class garbage_collection_paused:  # noqa: N801 - it reads as what holds within it
    """Within it no cycles are collected, in any thread; not for what may run long or throws large arrays away.

    Where the collector is switched off anyway nothing changes.
    """

    __slots__ = ("_mine",)

    def __enter__(self) -> None:
        with _lock:
            self._mine = bool(_resting[0]) or gc.isenabled()
            if self._mine:
                _resting[0] += 1
                gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._mine:
            with _lock:
                _resting[0] = max(0, _resting[0] - 1)
                if not _resting[0]:
                    _make_all_old()
                    gc.enable()


def _make_all_old() -> None:
    """Have only a collection of everything go through what there is; unless the application froze some of it once."""
    collections = gc.get_stats()[-1]["collections"]
    if collections != _made_old["collections"]:
        _made_old.update(collections=collections, objects=0)
    if _made_old["objects"] < MAX_MADE_OLD and not _application_freezes():
        _made_old["objects"] += gc.get_count()[0]
        gc.freeze()
        gc.unfreeze()


def _application_freezes() -> bool:
    """Whether it did once: to count what is frozen takes 10 ms where it is much."""
    _freezes[0] = _freezes[0] or gc.get_freeze_count() > FROZEN_BY_PYTHON
    return _freezes[0]


def _forked() -> None:
    global _lock
    _lock = threading.Lock()
    if _resting[0]:  # those who asked are threads of the parent, or this one, which switches it on again once more
        _resting[0] = 0
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
