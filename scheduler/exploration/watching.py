"""Watch: what each step of a controlled schedule reads and changes of the state that its threads share.

Two steps that touch nothing in common can be swapped, among them critical sections of one lock (LAPOR; Kokologiannakis,
Raad and Vafeiadis, "Effective Lock Handling in Stateless Model Checking", OOPSLA 2019). So nothing that a step touches
may be missed:

- In `OBSERVED` modules all state that threads share is in attributes of their classes (a test reads their code for
  other places). Each attribute is a field, and so is each list, dictionary, set, counter or array that one holds.
- Any other code, a scenario or an operator, may touch anything that is not watched. Any two such steps conflict. In
  schedules of code that is *race-free* only those conflict that hold a lock in common.

A field is changed if it differs between the beginning and the end of a step: a lock that a step takes and releases
counts as read. No other step can come between, as there is no decision point.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from types import BuiltinMethodType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

import numpy as np

from dagexec.platform.locks import new_lock, new_rlock
from dagexec.platform.records import WRITTEN
from dagexec.platform.threads import Threads
from dagexec.scheduler.exploration.events import Event

ELSEWHERE = "elsewhere"
"""The field that stands for all that is not watched."""

OBSERVED = (
    "dagexec.platform.threads",
    "dagexec.scheduler.run.affinity",
    "dagexec.scheduler.run.executing",
    "dagexec.scheduler.run.fair_share",
    "dagexec.scheduler.run.helping",
    "dagexec.scheduler.run.machine",
    "dagexec.scheduler.run.policy_machine",
    "dagexec.scheduler.run.pool",
    "dagexec.scheduler.run.roster",
    "dagexec.scheduler.run.run",
    "dagexec.scheduler.run.worker",
)

_CLASSES = ("dagexec.scheduler.run.engine:PoolMemory",)
"""Classes of other modules that are watched, as if those were observed."""

_DOORS = ("Executing._call",)
"""Functions of observed modules that call arbitrary code, perhaps not written in Python."""

_WITHOUT_STATE = (
    "collections",
    "contextlib",
    "pathlib",
    "dagexec.devices.sim.clock",
    "dagexec.errors",
    "dagexec.platform.arithmetic",
    "dagexec.platform.blocking",
    "dagexec.platform.deadline",
    "dagexec.platform.forking",
    "dagexec.platform.processor",
    "dagexec.platform.records",
    "dagexec.platform.shutdown",
    "dagexec.scheduler.exploration.controlled",
    "dagexec.scheduler.exploration.events",
    "dagexec.scheduler.exploration.watching",
    "numpy.core._ufunc_config",
    "numpy._core._ufunc_config",
)
"""Modules without state that a step of another thread could notice, except what the watch is told."""

_OF_THREADING = ("current_thread", "main_thread", "Thread.name", "Thread.ident", "Thread.native_id")

_SCALARS = (int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, deque, itertools.count, np.ndarray)
_CONSTANTS = (
    *_SCALARS,
    BaseException,
    Enum,
    FunctionType,
    MethodType,
    ModuleType,
    frozenset,
    partial,
    range,
    threading.Thread,
    threading.local,
    type,
    type(threading.Lock()),
    type(threading.RLock()),
    type(new_lock()),
    type(new_rlock()),
    weakref.ref,
)
_DEPTH = 3

_active: Watch | None = None
_watched: set[type] = set()
_known: dict[CodeType, bool] = {}


class WatchedLock(Protocol):
    """What the watch reads of a lock of a controlled schedule."""

    @property
    def name(self) -> str:
        """Unique in the schedule."""

    @property
    def holder(self) -> object:
        """None when it is free."""

    @property
    def time(self) -> float:
        """When it was released."""


class Watch:
    """What the current step has touched. One for each schedule.

    Attributes:
        going_on: there is a current step. What the schedule itself does between two is not watched.
        race_free: whatever is not watched is guarded by locks.
    """

    def __init__(self, *, race_free: bool = False) -> None:
        self.going_on = False
        self.race_free = race_free
        self._elsewhere = False
        self._before: dict[str, tuple[Callable[[], object], object]] = {}
        self._got: Counter[str] = Counter()  # how often the step has read a container from an attribute
        self._updated: Counter[str] = Counter()  # and only added or removed an element
        self._threads: dict[object, str] = {}
        self._written: set[str] = set()
        self._locks: list[WatchedLock] = []  # of the step
        self._held: dict[str, object] = {}  # locks by who has them
        self._names: dict[int, str] = {}
        self._kept: list[object] = []  # alive, so that no id is used twice
        self._made: Counter[str] = Counter()

    def end_step(self, event: Event, who: object) -> Event:
        """`event`, a step of `who`, with what it read, what it changed, and which locks it took and keeps."""
        self.going_on = False
        reads, writes, merges = set[str](), self._written, set[str]()
        for field, (look, before) in self._before.items():
            try:
                now = look()
            except _UnknownError:  # it holds something else now
                self._elsewhere = True
                now = _UnknownError
            if _same(now, before):
                reads.add(field)
            elif now is not _UnknownError and self._got[field] == self._updated[field] > 0:
                merges.add(field)
                writes.update(f"{element} in {field}" for element in self._difference(before, now))
            else:
                writes.add(field)
        if self._elsewhere:
            guards = {name for name, holder in self._held.items() if holder is who} | {
                lock.name for lock in self._locks
            }
            writes |= {f"{ELSEWHERE}, guarded by {name}" for name in guards} if self.race_free else {ELSEWHERE}
        for lock in self._locks:
            self._held[lock.name] = lock.holder
        keeps = frozenset(lock.name for lock in self._locks if lock.holder is not None)
        done = event._replace(
            reads=frozenset(reads - writes), writes=frozenset(writes), keeps=keeps, merges=frozenset(merges)
        )
        self._elsewhere, self._written = False, set()
        for used in (self._before, self._got, self._updated, self._locks):
            used.clear()
        return done

    def touches(self, field: str, look: Callable[[], object]) -> None:
        """The step reads `field`, and may change what `look` returns."""
        if self.going_on and field not in self._before:
            self._before[field] = look, look()

    def touches_lock(self, lock: WatchedLock) -> None:
        """The step looks at a lock, takes it or lets it go."""
        if self.going_on:
            self.touches(lock.name, lambda: (lock.holder, lock.time))
            self._locks.append(lock)

    def writes(self, field: str) -> None:
        """The step changes `field`."""
        if self.going_on:
            self._written.add(field)

    def has_identities(self, numbers: Iterable[int | None], thread: str) -> None:
        """Numbers that differ between schedules stand for a thread."""
        self._threads.update(dict.fromkeys(numbers, thread))

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        """For `sys.setprofile`: notices that unknown code is executed, or returned to."""
        if event == "c_call":
            owner = getattr(argument, "__self__", None)
            name = getattr(argument, "__name__", "")
            if (isinstance(owner, set) and name in ("add", "discard")) or (
                isinstance(owner, list) and name == "remove"
            ):
                self._updated[self._names.get(id(owner), "")] += self.going_on
        if event == "call":
            self._elsewhere |= self.going_on and not _is_known(frame.f_code)
        elif event == "return" and frame.f_back is not None:
            self._elsewhere |= self.going_on and not _is_known(frame.f_back.f_code)

    def touches_attribute(self, owner: object, name: str) -> None:
        """The step reads or sets an attribute of an object of a watched class."""
        self.touches(f"{self._name(owner)}.{name}", lambda: _attribute(owner, name))

    def touches_value(self, value: object) -> None:
        """The step reads `value` from an attribute, and may change what it holds."""
        if isinstance(value, BuiltinMethodType):
            value = value.__self__
        try:
            if isinstance(value, _CONTAINERS):
                self._got[self._name(value)] += 1
                self.touches(self._name(value), lambda: _content(value, _DEPTH))
            elif not _is_constant(value):
                self._elsewhere = True
        except _UnknownError:
            self._elsewhere = True

    def _difference(self, before: object, now: object) -> Iterator[str]:
        """Elements that only one of two containers has."""
        assert isinstance(before, list)
        assert isinstance(now, list)
        for first, second in ((before, now), (now, before)):
            for element in first:
                if not any(element is another or element == another for another in second):
                    yield self._threads.get(element) or self._names.get(id(element)) or repr(element)

    def makes(self, thing: object) -> None:
        """An object of a watched class is made."""
        if id(thing) not in self._names:
            self._new_name(thing, type(thing).__name__)

    def sets(self, owner: object, name: str, value: object) -> None:
        """An attribute is set; a container is named after the first attribute that holds it."""
        self.touches_attribute(owner, name)
        if isinstance(value, _CONTAINERS) and id(value) not in self._names:
            self._new_name(value, f"items of {self._name(owner)}.{name},")

    def _name(self, thing: object) -> str:
        """A name that is the same in all schedules that were the same so far."""
        if id(thing) not in self._names:  # it was made before the schedule
            self._names[id(thing)] = f"{type(thing).__name__} at {id(thing):x}"
            self._kept.append(thing)
        return self._names[id(thing)]

    def _new_name(self, thing: object, kind: str) -> None:
        self._made[kind] += 1
        self._names[id(thing)] = f"{kind} {self._made[kind]}"
        self._kept.append(thing)


class _UnknownError(Exception):
    """The content of a container may change without notice."""


def _content(value: Any, depth: int) -> object:
    """A value that differs when a container has changed."""
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise _UnknownError
        return value.shape, value.tobytes()
    items: Iterable[object] = itertools.chain.from_iterable(value.items()) if isinstance(value, dict) else value
    return [_item(item, depth - 1) for item in items]


def _item(value: object, depth: int) -> object:
    if isinstance(value, tuple):
        return tuple(_item(item, depth) for item in value)
    if isinstance(value, _CONTAINERS) and depth:
        return _content(value, depth)
    if not _is_constant(value):
        raise _UnknownError
    return value


def _same(first: object, second: object) -> bool:
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    return isinstance(first, _SCALARS) and first == second


def _is_constant(value: object) -> bool:
    """True when nothing in it can change, or only what is watched, too."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return isinstance(value, (*_CONSTANTS, *_watched)) or _is_frozen(type(value)) or hasattr(value, "is_controlled")


def _is_frozen(kind: type) -> bool:
    parameters = getattr(kind, "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


def _has_state(kind: type) -> bool:
    return not (
        _is_frozen(kind) or issubclass(kind, BaseException | tuple | Threads) or getattr(kind, "_is_protocol", False)
    )


def _attribute(owner: object, name: str) -> object:
    try:
        return object.__getattribute__(owner, name)
    except AttributeError:
        return _UnknownError


def _is_known(code: CodeType) -> bool:
    """True for code that touches only what is watched."""
    is_known = _known.get(code)
    if is_known is None:
        file, name = code.co_filename, code.co_qualname
        of_record = file == WRITTEN or (file == "<string>" and name == "<lambda>")
        harmless = file == threading.__file__ and name in _OF_THREADING
        is_known = _known[code] = of_record or harmless or (file in _known_files() and name not in _DOORS)
    return is_known


def _known_files() -> set[str | None]:
    return {sys.modules[name].__file__ for name in (*OBSERVED, *_WITHOUT_STATE) if name in sys.modules}


@contextmanager
def watching() -> Iterator[None]:
    """Within the block, objects of observed modules report to the current schedule's watch. One user at a time."""
    before: list[tuple[type, str, object]] = []
    kinds = tuple(_classes())
    _watched.update(kinds)
    for kind in kinds:
        hooks: dict[str, Callable[[Any], Any]] = {"__init__": _hooked_init} if "__init__" in kind.__dict__ else {}
        if not any(base in _watched for base in kind.__mro__[1:]):
            hooks |= {"__getattribute__": _hooked_get, "__setattr__": _hooked_set}
        for name, hook in hooks.items():
            before.append((kind, name, kind.__dict__.get(name)))
            setattr(kind, name, hook(getattr(kind, name)))
    try:
        yield
    finally:
        for kind, name, value in before:
            if value is None:
                delattr(kind, name)
            else:
                setattr(kind, name, value)
        _watched.clear()
        _known.clear()


@contextmanager
def watched_by(watch: Watch | None) -> Iterator[None]:
    """Within the block, the current schedule's watch is `watch`."""
    global _active
    _active = watch
    try:
        yield
    finally:
        _active = None


def _classes() -> Iterator[type]:
    """The classes of observed modules, except immutable records, errors, protocols and sources of threads."""
    for name in OBSERVED:
        for kind in vars(importlib.import_module(name)).values():
            if isinstance(kind, type) and kind.__module__ == name and _has_state(kind):
                yield kind
    for name in _CLASSES:
        module, _, kind_name = name.partition(":")
        kind = getattr(importlib.import_module(module), kind_name)
        _known.update((value.__code__, True) for value in vars(kind).values() if isinstance(value, FunctionType))
        yield kind


def _hooked_get(before: Callable[[object, str], object]) -> Callable[[object, str], object]:
    def get(self: object, name: str) -> object:
        value = before(self, name)
        watch = _active
        if watch is not None and watch.going_on and not name.startswith("__") and not _is_of_class(type(self), name):
            watch.touches_attribute(self, name)
            watch.touches_value(value)
        return value

    return get


def _hooked_set(before: Callable[[object, str, object], None]) -> Callable[[object, str, object], None]:
    def set_attribute(self: object, name: str, value: object) -> None:
        watch = _active
        if watch is not None and watch.going_on:
            watch.sets(self, name, value)
        before(self, name, value)

    return set_attribute


def _hooked_init(before: Callable[..., None]) -> Callable[..., None]:
    def initialize(self: object, *positional: object, **named: object) -> None:
        watch = _active
        if watch is not None and watch.going_on:
            watch.makes(self)
        before(self, *positional, **named)

    return initialize


def _is_of_class(kind: type, name: str) -> bool:
    """True for methods and properties, which an instance gets from its class."""
    attribute = next((base.__dict__[name] for base in kind.__mro__ if name in base.__dict__), None)
    return isinstance(attribute, FunctionType | property | staticmethod | classmethod | type)
