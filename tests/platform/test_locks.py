"""Locks that a signal interrupts at any point: they are free afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dagexec.platform import locks
from dagexec.platform.locks import Mutex, new_lock, new_rlock
from tests.interrupts import InterruptedAtPoints

KINDS = [new_lock, new_rlock]


@pytest.mark.parametrize("is_guarded", [False, True])
@pytest.mark.parametrize("make", KINDS)
def test_an_interrupted_block_leaves_its_lock_free(
    make: Callable[[], Mutex], is_guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_guarded:  # what Python 3.14 has, under any
        monkeypatch.setattr(locks, "_LEAVES_LOCKS_HELD", True)
    lock = make()
    blocks = []

    def hold() -> None:
        with lock:
            blocks.append(len(blocks))
        assert is_free(lock)

    interrupted = InterruptedAtPoints("platform/locks", "test_locks")

    def attempt() -> None:
        try:
            interrupted.look(hold)
        finally:
            assert is_free(lock)

    interrupted(attempt, fewest=2)
    assert blocks


def is_free(lock: Mutex) -> bool:
    """True when nobody holds it, the calling thread included."""
    held = lock._is_owned() if hasattr(lock, "_is_owned") else lock.locked()  # type: ignore[attr-defined]
    return not held


@pytest.mark.parametrize("is_guarded", [False, True])
def test_a_lock_may_be_taken_again_or_not(is_guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_LEAVES_LOCKS_HELD", is_guarded)
    with new_rlock() as again, new_lock():
        assert again
    lock, other = new_rlock(), new_lock()
    with lock, lock:
        pass
    assert is_free(lock)
    with other:
        assert not other.acquire(blocking=False)
    assert other.acquire(blocking=False)
    other.release()
