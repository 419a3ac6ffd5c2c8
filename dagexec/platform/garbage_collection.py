"""Pauses Python's garbage collector of cycles while very many lasting objects are made.

It examines new objects after every 700, and all objects once they have grown by a quarter. While a net is compiled
nearly all objects last, so that a quarter of the time was spent on finding nothing.

Objects made meanwhile count as old at the end. Otherwise the next collection, in any thread, would examine all of them
at once while no other thread has the interpreter: 3 to 6 ms after a small net.
"""

from __future__ import annotations

import gc
import os
import sys

from dagexec.platform.locks import new_lock

MAX_MADE_OLD = 100_000
"""New objects after which no more are made old until a full collection: Python does that for what grew old."""

FROZEN_BY_PYTHON = 1000
"""Python 3.12 starts with a few hundred frozen objects of its own."""

HAS_GENERATIONS = "t" not in getattr(sys, "abiflags", "")
"""Builds without the interpreter lock examine all objects at each collection, and know no old ones."""

_lock = new_lock()
_resting = [0]  # open blocks
_made_old = {"collections": 0, "objects": 0}  # full collections so far; objects since the last one
_freezes = [False]  # whether the application was seen to freeze objects


class garbage_collection_paused:  # noqa: N801 - it reads as what holds within it
    """Within it no thread collects cycles; not for work that may run long or drops large arrays.

    If the collector is off anyway, nothing changes.
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
    """Leave existing objects to full collections, unless the application has ever frozen some."""
    collections = gc.get_stats()[-1]["collections"]
    if collections != _made_old["collections"]:
        _made_old.update(collections=collections, objects=0)
    if HAS_GENERATIONS and _made_old["objects"] < MAX_MADE_OLD and not _application_freezes():
        _made_old["objects"] += gc.get_count()[0]
        gc.freeze()
        gc.unfreeze()


def _application_freezes() -> bool:
    """Whether it ever has, as counting many frozen objects takes 10 ms."""
    _freezes[0] = _freezes[0] or gc.get_freeze_count() > FROZEN_BY_PYTHON
    return _freezes[0]


def _forked() -> None:
    global _lock
    _lock = new_lock()
    if _resting[0]:  # the blocks are of the parent's threads, or of this one, which switches it on once more
        _resting[0] = 0
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
