"""Memory in tests: a machine that has little of it, and how much a call takes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest

from dagexec.platform import host_memory
from dagexec.platform.host_memory import CommittedMemory, Limit


def leave(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Until `monkeypatch` is undone, the machine has `nbytes` bytes left, of which nothing was committed before."""
    monkeypatch.setattr(host_memory, "limits", lambda: iter([Limit(nbytes, "this machine")]))
    monkeypatch.setattr(host_memory, "_committed_memory", CommittedMemory())


def peak_memory(*calls: Callable[[], object]) -> int:
    """The most bytes at a time that the calls, one after the other, take from Python's allocators."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for call in calls:
            call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
