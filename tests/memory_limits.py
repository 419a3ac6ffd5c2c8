"""A machine with little memory, for tests."""

from __future__ import annotations

import pytest

from dagexec.platform import host_memory
from dagexec.platform.host_memory import CommittedMemory, Limit


def leave(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Until `monkeypatch` is undone, the machine has `nbytes` bytes left, of which nothing was committed before."""
    monkeypatch.setattr(host_memory, "limits", lambda: iter([Limit(nbytes, "this machine")]))
    monkeypatch.setattr(host_memory, "_committed_memory", CommittedMemory())
