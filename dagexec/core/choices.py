"""Choices by measurement: which of several ways to compute is fastest here, kept for the process and in a file.

A choice is text under a key that names all that it depends on: processor, library and its version, geometry, threads.
Measuring takes time, so it is done only until a deadline: `with measuring(seconds):`. Outside of it, existing choices
are used, and for the rest the caller's rule decides. `postponed` measures the most important choices first. At the end
of `measuring` new choices go to the cache file: `$DAGEXEC_CHOICES` (a path, or "off"), else
`$XDG_CACHE_HOME/dagexec/choices.json`, where `~/.cache` is the default. A damaged or foreign file causes a warning and
is not read: its choices are measured again.
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
from dagexec.platform.locks import new_rlock
from dagexec.platform.threads import acquire

logger = logging.getLogger("dagexec")

_FORMAT = "dagexec choices"
_BATCH = " | batch "  # the last part of a key, when it is there


class Choices:
    """Choices by key. Threads may use it at once.

    Attributes:
        generation: changes whenever a choice may have changed.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._lock = ProcessLock()
        self._loaded: dict[str, str] = {}
        self._measured: dict[str, str] = {}
        self._new: dict[str, str] = {}
        self._file: Path | None = None
        self._looked = False

    def find(self, key: str, *, given_only: bool = False) -> str | None:
        """The choice under `key`; with `given_only`, only from files that were passed to `load`."""
        with self._lock.own:
            choice = self._loaded.get(key)
            if choice is not None or given_only:
                return choice
            self._read_cache()
            return self._measured.get(key)

    def is_empty(self) -> bool:
        """True without choices: then no key is needed, which saves the digest of a whole net."""
        with self._lock.own:
            self._read_cache()
            return not (self._measured or self._loaded)

    def near(self, key: str) -> str | None:
        """The choice for the nearest other batch; None where `key` does not end with a batch."""
        family, separator, batch = key.rpartition(_BATCH)
        if not separator:
            return None
        start = family + _BATCH
        kin = {other[len(start) :]: name for other, name in self.all().items() if other.startswith(start)}
        sizes = [size for size in kin if size.isdigit()]
        target = float(batch)
        return kin[min(sizes, key=lambda size: abs(math.log2(max(1, int(size)) / target)))] if sizes else None

    def keep(self, key: str, choice: str) -> str:
        """Keep a measured choice, unless another was kept meanwhile. Returns the valid one."""
        with self._lock.own:
            valid = self._measured.setdefault(key, choice)
            if valid is choice:
                self._new[key] = choice
                self.generation += 1
            return valid

    def forget(self) -> None:
        """Drop all choices; the cache file stays, and is read again at the next request."""
        with self._lock.own:
            self._loaded, self._measured, self._new, self._looked = {}, {}, {}, False
            self.generation += 1

    def all(self) -> dict[str, str]:
        """All valid choices."""
        with self._lock.own:
            self._read_cache()
            return self._measured | self._loaded

    def load(self, path: str | Path) -> int:
        """Read a file that `save` wrote; its choices take precedence over measured ones. Returns their number.

        Raises ModelFormatError when the file cannot be read or is something else.
        """
        loaded = _read(Path(path))
        with self._lock.own:
            self._loaded.update(loaded)
            self.generation += 1
        return len(loaded)

    def save(self, path: str | Path) -> int:
        """Write all choices to a file, atomically. Returns their number. Raises OutputError when that fails."""
        everything = self.all()
        _write(Path(path), everything)
        return len(everything)

    def flush(self) -> None:
        """Add the choices measured since the last call to the cache file. When that fails, a warning says so."""
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
            logger.warning("choices are not saved: %s", str(error))

    def _read_cache(self) -> None:
        """Read the cache file, the first time."""
        if self._looked:
            return
        self._file = cache_file()
        if self._file is not None:
            self._measured = (_read_or_warn(self._file) or {}) | self._measured
        self._looked = True  # last: a child may be forked meanwhile


def cache_file() -> Path | None:
    """The cache file, shared by processes; None when it is switched off."""
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
    """The choices of a file; None where there is none, or, with a warning, where it is not such a file."""
    try:
        if not path.exists():
            return None
        return _read(path)
    except (ModelFormatError, OSError, ValueError) as error:  # ValueError: a null character in the path
        logger.warning("the cache of choices is not used: %s", str(error))
        return None


def _read(path: Path) -> dict[str, str]:
    try:
        with reading(path) as file:
            content = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path}: choices cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("version") != 1:
        raise ModelFormatError(f"{path}: expected a file of {_FORMAT}, version 1")
    by_key = content.get("choices")
    if not isinstance(by_key, dict) or not all(isinstance(choice, str) for choice in by_key.values()):
        raise ModelFormatError(f"{path}: choices must map keys to names")
    return by_key


def _write(path: Path, by_key: dict[str, str]) -> None:
    content = {"format": _FORMAT, "version": 1, "choices": dict(sorted(by_key.items()))}
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


_turn = new_rlock()
_until: ContextVar[Deadline | None] = ContextVar("_until", default=None)
_lock = ProcessLock()
_blocks: list[int] = []  # the threads that are in blocks of `measuring`
_at_end: list[Callable[[], object]] = []


@contextmanager
def measuring(seconds: float) -> Iterator[None]:
    """For so many seconds of the block, `choose` may measure in this thread.

    A nested block has at most the rest of the outer block's time. At the end new choices go to the cache file, also
    when the block is interrupted.
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
    """Make the postponed calls, if no block is left."""
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
        _turn = new_rlock()
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
    """For how long this thread may measure now; 0 outside of `measuring`, negative after its end."""
    deadline = _until.get()
    return 0.0 if deadline is None else deadline.left()


Measure = Callable[[float], str | None]
"""Finds the fastest within seconds; None when they are not enough."""

_postponed: ContextVar[dict[str, tuple[float, Measure]] | None] = ContextVar("_postponed", default=None)


@contextmanager
def postponed() -> Iterator[Callable[[], bool]]:
    """Within the block, `choose` measures nothing in this thread, but notes what it would measure.

    The function that it yields measures what was noted, by descending weight, as long as seconds are left; it returns
    whether they sufficed.
    """
    noted: dict[str, tuple[float, Measure]] = {}

    def measure() -> bool:
        for key, (_, measure_one) in sorted(noted.items(), key=lambda item: -item[1][0]):
            if seconds_left() <= 0:
                return False
            with suppress(UnsupportedFeatureError):  # raised again at preparation
                choose(key, measure_one)
        return seconds_left() > 0

    token = _postponed.set(noted)
    try:
        yield measure
    finally:
        _postponed.reset(token)


def choose(key: str, measure: Measure, *, weight: float = 0.0) -> str | None:
    """The choice under `key`, measured now if need be; None when there is no time for that.

    `measure` gets the remaining seconds. Threads measure one at a time, so that none disturbs another. `weight` is the
    importance of the choice, in any unit: see `postponed`.
    """
    choice = choices.find(key)
    if choice is not None or seconds_left() <= 0:
        return choice
    noted = _postponed.get()
    if noted is not None:
        noted[key] = (noted.get(key, (0.0, measure))[0] + weight, measure)
        return None
    if not acquire(_turn, max(0.0, seconds_left())):
        return None
    try:
        check_stop()
        choice = choices.find(key)
        seconds = seconds_left()
        if choice is not None or seconds <= 0:
            return choice
        measured = measure(seconds)
        return None if measured is None else choices.keep(key, measured)
    finally:
        _turn.release()
