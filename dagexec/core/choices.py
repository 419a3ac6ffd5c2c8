"""Choices by measurement: which of several ways to compute is fastest here, kept for the process and in a file.

A choice is text under a key that names all that it depends on: processor, library and its version, geometry, threads.
Measuring takes time, so it happens until a deadline only: `with measuring(seconds):`. Outside of it, what is known is
used and for the rest the caller's rule decides. `postponed` lets the dearest be measured first. At the end of
`measuring` new choices go to the cache file: `$DAGEXEC_CHOICES` (a path, or "off"), else
`$XDG_CACHE_HOME/dagexec/choices.json`, where `~/.cache` is the default. A file that is damaged, or is something else,
is warned of and not read; what it costs is to measure again.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from dagexec.errors import ModelFormatError, OutputError, UnsupportedFeatureError
from dagexec.platform.deadline import Deadline, check_stop
from dagexec.platform.disk import make_folders, reading
from dagexec.platform.files import write_atomically
from dagexec.platform.forking import ProcessLock
from dagexec.platform.threads import acquire

logger = logging.getLogger("dagexec")

_FORMAT = "dagexec choices"
_BATCH = " | batch "  # the last part of a key, when it is there


class Choices:
    """Choices by key. Threads may use it at once.

    Attributes:
        generation: another number whenever a choice may have become another.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._lock = ProcessLock()
        self._given: dict[str, str] = {}
        self._known: dict[str, str] = {}
        self._new: dict[str, str] = {}
        self._file: Path | None = None
        self._looked = False

    def find(self, key: str, *, given_only: bool = False) -> str | None:
        """What was chosen under `key`; `given_only`: in a file that the caller named to `load`."""
        with self._lock.own:
            found = self._given.get(key)
            if found is not None or given_only:
                return found
            self._read_cache()
            return self._known.get(key)

    def is_empty(self) -> bool:
        """True when nothing was chosen: then no key needs to be made, which takes a digest of a whole net."""
        with self._lock.own:
            self._read_cache()
            return not (self._known or self._given)

    def near(self, key: str) -> str | None:
        """What was chosen under a key with another batch, the nearest; None where `key` does not end with a batch."""
        family, found, batch = key.rpartition(_BATCH)
        if not found:
            return None
        start = family + _BATCH
        kin = {other[len(start) :]: name for other, name in self.all().items() if other.startswith(start)}
        sizes = [size for size in kin if size.isdigit()]
        wanted = float(batch)
        return kin[min(sizes, key=lambda size: abs(math.log2(max(1, int(size)) / wanted)))] if sizes else None

    def keep(self, key: str, choice: str) -> str:
        """Keep a measured choice, unless another was kept meanwhile. Returns the one that holds."""
        with self._lock.own:
            kept = self._known.setdefault(key, choice)
            if kept is choice:
                self._new[key] = choice
                self.generation += 1
            return kept

    def forget(self) -> None:
        """Drop all choices; the cache file is left alone, and is read again when something is requested."""
        with self._lock.own:
            self._given, self._known, self._new, self._looked = {}, {}, {}, False
            self.generation += 1

    def all(self) -> dict[str, str]:
        """All choices that hold."""
        with self._lock.own:
            self._read_cache()
            return self._known | self._given

    def load(self, path: str | Path) -> int:
        """Read a file that `save` wrote; its choices go before measured ones. Returns how many there are.

        Raises ModelFormatError when the file cannot be read or is something else.
        """
        found = _read(Path(path))
        with self._lock.own:
            self._given.update(found)
            self.generation += 1
        return len(found)

    def save(self, path: str | Path) -> int:
        """Write all choices to a file, atomically. Returns how many. Raises OutputError when that fails."""
        found = self.all()
        _write(Path(path), found)
        return len(found)

    def flush(self) -> None:
        """Add what was measured since the last time to the cache file. When that fails, a warning says so."""
        with self._lock.own:
            self._read_cache()
            path, new = self._file, self._new
            if path is None or not new:
                return
            self._new = {}
        try:
            make_folders(path.parent)
            _write(path, (_read_or_warn(path) or {}) | new)
        except (OutputError, OSError) as error:
            logger.warning("choices are not saved: %s", error)

    def _read_cache(self) -> None:
        """Read the cache file, the first time."""
        if self._looked:
            return
        self._file = cache_file()
        if self._file is not None:
            self._known = (_read_or_warn(self._file) or {}) | self._known
        self._looked = True  # last: a child may be forked meanwhile


def cache_file() -> Path | None:
    """Where choices are kept from one process to the next; None when that is switched off."""
    named = os.environ.get("DAGEXEC_CHOICES", "")
    if named == "off":
        return None
    if named:
        return Path(named)
    folder = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(folder) if folder else Path.home() / ".cache") / "dagexec" / "choices.json"
    except RuntimeError:  # nobody's home
        return None


def _read_or_warn(path: Path) -> dict[str, str] | None:
    """The choices of a file; None where there is none, or where it is no such file, which is warned of."""
    try:
        if not path.exists():
            return None
        return _read(path)
    except (ModelFormatError, OSError, ValueError) as error:  # ValueError: a null character in the path
        logger.warning("the cache of choices is not used: %s", error)
        return None


def _read(path: Path) -> dict[str, str]:
    try:
        with reading(path) as file:
            content = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path}: choices cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("version") != 1:
        raise ModelFormatError(f"{path}: expected a file of {_FORMAT}, version 1")
    found = content.get("choices")
    if not isinstance(found, dict) or not all(isinstance(choice, str) for choice in found.values()):
        raise ModelFormatError(f"{path}: choices must map keys to names")
    return found


def _write(path: Path, found: dict[str, str]) -> None:
    content = {"format": _FORMAT, "version": 1, "choices": dict(sorted(found.items()))}
    write_atomically(path, json.dumps(content, indent=1).encode())


choices = Choices()
"""The choices of this process."""


def load_choices(path: str | Path) -> int:
    """Reuse the measured choices of another process or machine: read a file that `save_choices` wrote.

    Loaded choices take precedence over measured ones. Those for other processors and libraries are kept but not used.
    Returns the number of choices. Raises ModelFormatError if the file cannot be read or has another format.
    """
    return choices.load(path)


def save_choices(path: str | Path) -> int:
    """Write all choices, measured and loaded, atomically to a JSON file, and return their number.

    Raises OutputError if the file cannot be written.
    """
    return choices.save(path)


_turn = threading.RLock()
_until: ContextVar[Deadline | None] = ContextVar("_until", default=None)
_lock = ProcessLock()
_blocks: list[int] = []  # of `measuring`: the thread that is in it
_at_end: list[Callable[[], object]] = []


@contextmanager
def measuring(seconds: float) -> Iterator[None]:
    """For so many seconds of the block, `choose` may measure in this thread.

    A block within another has no more time than is left of that. At the end, what was measured goes to the cache file,
    also when the block is interrupted.
    """
    outer = _until.get()
    token = _until.set(Deadline(seconds) if outer is None else outer.within(seconds))
    me = threading.get_ident()
    with _lock.own:
        _blocks.append(me)
    try:
        yield
    finally:
        _until.reset(token)
        with _lock.own:
            _blocks.remove(me)
        _end_if_over()
        choices.flush()


def _end_if_over() -> None:
    """Make the calls that were put off, if no block is left."""
    callbacks: list[Callable[[], object]] = []
    with _lock.own:
        if not _blocks:
            callbacks, _at_end[:] = list(_at_end), []
    for callback in callbacks:
        callback()


def _in_child() -> None:
    """After `os.fork`: only the thread that forked continues measuring."""
    global _turn
    if _turn.acquire(blocking=False):
        _turn.release()
    else:
        _turn = threading.RLock()
    me = threading.get_ident()
    _blocks[:] = [thread for thread in _blocks if thread == me]
    _end_if_over()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def at_end_of_measuring(callback: Callable[[], object]) -> None:
    """Call `callback` once when no block of `measuring` is left: for memory that is kept from one key to the next."""
    with _lock.own:
        _at_end.append(callback)


def seconds_left() -> float:
    """For how long this thread may measure now; 0 outside of `measuring`, less once it is over."""
    deadline = _until.get()
    return 0.0 if deadline is None else deadline.left()


Measure = Callable[[float], str | None]
"""Finds the fastest within seconds; None when they are not enough."""

_postponed: ContextVar[dict[str, tuple[float, Measure]] | None] = ContextVar("_postponed", default=None)


@contextmanager
def postponed() -> Iterator[Callable[[], bool]]:
    """Within the block, `choose` measures nothing in this thread, but notes what it would measure.

    The function that it gives measures what was noted, what has the largest weight first, as long as seconds are left;
    it says whether they sufficed.
    """
    noted: dict[str, tuple[float, Measure]] = {}

    def measure() -> bool:
        for key, (_, one) in sorted(noted.items(), key=lambda item: -item[1][0]):
            if seconds_left() <= 0:
                return False
            with suppress(UnsupportedFeatureError):  # whoever prepares it is told so again
                choose(key, one)
        return seconds_left() > 0

    token = _postponed.set(noted)
    try:
        yield measure
    finally:
        _postponed.reset(token)


def choose(key: str, measure: Measure, *, weight: float = 0.0) -> str | None:
    """The choice under `key`: known, or measured now; None when it is not known and there is no time for it.

    `measure` gets the seconds that are left. One thread measures at a time, so that none disturbs another. `weight` is
    what the choice matters, in any unit: see `postponed`.
    """
    found = choices.find(key)
    if found is not None or seconds_left() <= 0:
        return found
    noted = _postponed.get()
    if noted is not None:
        noted[key] = (noted.get(key, (0.0, measure))[0] + weight, measure)
        return None
    if not acquire(_turn, max(0.0, seconds_left())):
        return None
    try:
        check_stop()
        found = choices.find(key)
        left = seconds_left()
        if found is not None or left <= 0:
            return found
        measured = measure(left)
        return None if measured is None else choices.keep(key, measured)
    finally:
        _turn.release()
