"""The collector of cycles is at rest while a net is made, and does not go through all that was made afterwards."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dagexec.platform import garbage_collection
from dagexec.platform.garbage_collection import FROZEN_BY_PYTHON, MAX_MADE_OLD, garbage_collection_paused
from tests.free_threading import not_free_threaded
from tests.held import PATIENCE

has_generations = not_free_threaded("its collector knows no old objects")


class Made:
    """Is in a cycle with itself."""

    def __init__(self) -> None:
        self.me = self


@contextmanager
def frozen() -> Iterator[None]:
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@pytest.fixture(autouse=True)
def a_collector_that_is_on_and_nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tests as a whole are frozen at their start."""
    monkeypatch.setitem(garbage_collection._made_old, "objects", 0)
    monkeypatch.setattr(garbage_collection, "_freezes", [False])
    was_frozen = gc.get_freeze_count() > FROZEN_BY_PYTHON
    gc.unfreeze()
    end = time.monotonic() + PATIENCE
    while garbage_collection._resting[0] and time.monotonic() < end:
        time.sleep(0.01)  # a thread that an earlier test left behind compiles something
    assert gc.isenabled()
    yield
    if was_frozen:
        gc.freeze()


def is_old(made: Made) -> bool:
    return any(found is made for found in gc.get_objects(generation=2))


@has_generations
def test_what_was_made_meanwhile_is_old_at_the_end_and_not_frozen() -> None:
    with garbage_collection_paused():
        with garbage_collection_paused():
            made = Made()
        assert not gc.isenabled()
        assert not is_old(made)
    assert gc.isenabled()
    assert is_old(made)
    assert not gc.get_freeze_count()


@has_generations
@pytest.mark.slow
def test_after_very_many_objects_python_finds_itself_out_when_to_collect_everything() -> None:
    with garbage_collection_paused():
        many = [Made() for _ in range(MAX_MADE_OLD)]
    assert is_old(many[-1])
    with garbage_collection_paused():
        later = Made()
    assert not is_old(later)
    gc.collect()
    with garbage_collection_paused():
        last = Made()
    assert is_old(last)


@pytest.mark.slow
def test_what_the_application_froze_stays_frozen() -> None:
    with frozen():
        before = gc.get_freeze_count()
        with garbage_collection_paused():
            made = Made()
        assert gc.get_freeze_count() == before > FROZEN_BY_PYTHON
        assert not is_old(made)


@pytest.mark.slow
def test_what_is_frozen_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes long where it is much: 14 ms at the end of each of the pauses of these tests."""
    counted = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(1) or 2 * FROZEN_BY_PYTHON)
    for _ in range(3):
        with garbage_collection_paused():
            made = Made()
        assert not is_old(made)
    assert len(counted) == 1


@pytest.mark.slow
def test_nothing_changes_where_the_application_switched_it_off() -> None:
    gc.disable()
    try:
        with garbage_collection_paused():
            made = Made()
        assert not gc.isenabled()
        assert not is_old(made)
    finally:
        gc.enable()
