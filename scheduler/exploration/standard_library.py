"""The standard library's threads, locks, queues and clocks as parts of a controlled schedule: code runs unmodified.

What an application uses of `threading`, `queue`, `concurrent.futures` and asyncio is Python code over a few primitives:
locks, the start of a thread, and the time. During a schedule these are replaced wherever a module has them under some
name. A replacement acts by its caller: for a thread of the schedule it is the schedule's primitive, for any other the
system's. Real connections and processes, which no schedule controls, are errors for a thread of the schedule.
"""

from __future__ import annotations

import _thread
import asyncio.events
import concurrent.futures._base
import concurrent.futures.thread
import functools
import itertools
import logging
import queue
import random
import selectors
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from dagexec.errors import DagexecError
from dagexec.platform.threads import Thread, ThreadsEndedError
from dagexec.scheduler.exploration import controlled
from dagexec.scheduler.exploration.controlled import ControlledThread, ControlledThreads, current_world
from dagexec.scheduler.exploration.event_loop import ControlledEventLoop

_FIRST_SECOND = 1_750_000_000.0
"""The value of `time.time` at the beginning of a schedule."""

_UNTOUCHED = (
    "_thread", "dagexec.scheduler.exploration", "dagexec.platform.threads", "dagexec.platform.timer_thread",
)  # fmt: skip
_REFUSED = frozenset((
    "socket.bind", "socket.connect", "socket.getaddrinfo", "socket.gethostbyaddr", "socket.gethostbyname",
    "socket.sendmsg", "socket.sendto", "subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn",
    "os.spawn", "os.system", "pty.spawn", "_thread.start_new_thread", "_thread.start_joinable_thread",
))  # fmt: skip

_RLOCK = type(_thread.RLock())
_LOCK = type(_thread.allocate_lock())


class Lock:
    """Replaces `threading.Lock`: a lock of each schedule whose threads use it, and of the system for other threads.

    An object that is made in one schedule may be used later in another, or in none.
    """

    def __init__(self, make: Callable[[], Any] = _thread.allocate_lock, real: Any = None) -> None:
        self._make = make
        self._real = make() if real is None else real
        self._inside: tuple[ControlledThreads, Any] | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As in `threading.Lock`, like the methods that follow."""
        return bool(self._here().acquire(blocking, timeout))

    def release(self) -> None:
        self._here().release()

    def locked(self) -> bool:
        return bool(self._here().locked())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._here(), name)

    def _is_owned(self) -> bool:
        lock = self._here()
        return bool(lock._is_owned() if hasattr(lock, "_is_owned") else lock.locked())

    def _at_fork_reinit(self) -> None:
        self._real, self._inside = self._make(), None

    def _here(self) -> Any:
        world = current_world()
        if world is None:
            return self._real
        if self._inside is None or self._inside[0] is not world:
            self._inside = (world, world.lock() if self._make is _thread.allocate_lock else threading.RLock())
        return self._inside[1]


class SimpleQueue:
    """Replaces `queue.SimpleQueue`, whose lock is out of reach."""

    def __new__(cls) -> Any:
        return queue._PySimpleQueue() if current_world() else _SIMPLE_QUEUE()  # type: ignore[attr-defined]


class DefaultSelector:
    """Replaces `selectors.DefaultSelector`."""

    def __new__(cls) -> Any:
        if current_world() is not None:
            raise _uncontrolled("a selector, which waits for real files and connections")
        return _SELECTOR()


_SIMPLE_QUEUE = queue.SimpleQueue
_SELECTOR = selectors.DefaultSelector
_NEW_EVENT_LOOP = asyncio.events.new_event_loop
_START, _JOIN, _IS_ALIVE = threading.Thread.start, threading.Thread.join, threading.Thread.is_alive


def _new_event_loop() -> asyncio.AbstractEventLoop:
    return ControlledEventLoop() if current_world() else _NEW_EVENT_LOOP()


def _start(thread: threading.Thread) -> None:
    """`Thread.start`, of subclasses too."""
    world = current_world()
    if world is None or isinstance(thread, ControlledThread):
        _START(thread)
        return
    if not hasattr(thread, "_started"):
        raise RuntimeError("thread.__init__() not called")
    if thread._started.is_set():
        raise RuntimeError("threads can only be started once")
    thread._started._flag = True
    thread._controlled = world.start(lambda: _run(thread), thread.name)  # type: ignore[attr-defined]


def _run(thread: threading.Thread) -> None:
    """Execute `thread`, as `threading.current_thread()`."""
    me = threading.get_ident()
    active: dict[int, threading.Thread] = threading._active  # type: ignore[attr-defined]
    previous, active[me] = active[me], thread
    thread._ident = me  # type: ignore[attr-defined]
    try:
        thread.run()
    finally:
        active[me] = previous


def _join(thread: threading.Thread, timeout: float | None = None) -> None:
    inside: Thread | None = getattr(thread, "_controlled", None)
    if inside is None:
        _JOIN(thread, timeout)
    elif thread is threading.current_thread():
        raise RuntimeError("cannot join current thread")
    else:
        inside.join(None if timeout is None else max(0.0, timeout))


def _is_alive(thread: threading.Thread) -> bool:
    inside: Thread | None = getattr(thread, "_controlled", None)
    return _IS_ALIVE(thread) if inside is None else inside.is_alive()


def _numbered(kind: type) -> Callable[..., None]:
    """`kind.__init__` that also numbers objects made in a schedule, so that sets have one order in every replay."""
    init: Callable[..., None] = vars(kind)["__init__"]

    @functools.wraps(init)
    def numbered(made: Any, *arguments: Any, **options: Any) -> None:
        if current_world() is not None:
            made._number = next(_numbers[-1])
        init(made, *arguments, **options)

    return numbered


_numbers: list[Iterator[int]] = [itertools.count()]


def _number(value: object) -> int:
    number: int | None = getattr(value, "_number", None)
    return id(value) if number is None else number


def _hash(value: object) -> int:
    number: int | None = getattr(value, "_number", None)
    return object.__hash__(value) if number is None else number


def _sleep(seconds: float, /) -> None:
    world = current_world()
    if world is None:
        _CLOCKS["sleep"](seconds)
    elif seconds < 0:
        raise ValueError("sleep length must be non-negative")
    elif seconds == 0:
        world.point("sleep 0 s")
    else:
        world.wait(lambda: False, seconds, None, "wait", f"{seconds:g} s")


_CLOCKS: Mapping[str, Callable[..., Any]] = {
    name: getattr(time, name)
    for name in ("sleep", "monotonic", "perf_counter", "time", "monotonic_ns", "perf_counter_ns", "time_ns")
}


def _clock(name: str) -> Callable[[], Any]:
    """The clock `name` of `time`, virtual for threads of a schedule."""
    real, since = _CLOCKS[name], _FIRST_SECOND if name.startswith("time") else 0.0

    def read() -> Any:
        world = current_world()
        if world is None:
            return real()
        seconds = since + world.monotonic()
        return round(seconds * 1e9) if name.endswith("_ns") else seconds

    read.__name__ = name
    return read


class _Replaced(NamedTuple):
    """A name in a module with its value before and during a schedule."""

    namespace: dict[str, Any]
    name: str
    before: Any
    after: Any


def _replacements() -> dict[int, Any]:
    clocks = {name: _sleep if name == "sleep" else _clock(name) for name in _CLOCKS}
    return {id(_CLOCKS[name]): clock for name, clock in clocks.items()} | {
        id(_thread.allocate_lock): Lock,
        id(threading.Lock): Lock,
        id(_SIMPLE_QUEUE): SimpleQueue,
        id(_SELECTOR): DefaultSelector,
        id(_NEW_EVENT_LOOP): _new_event_loop,
    }


REPLACEMENTS = _replacements()
"""The replacements, by the id of what they replace."""


class _Found:
    """The names in modules under which replaced values are; looked up again when modules were imported."""

    def __init__(self) -> None:
        self._modules = 0
        self._found: list[_Replaced] = []

    def all(self) -> list[_Replaced]:
        if len(sys.modules) != self._modules:
            self._modules = len(sys.modules)
            self._found = [
                _Replaced(namespace, key, value, after)
                for name, module in tuple(sys.modules.items())
                if not name.startswith(_UNTOUCHED) and (namespace := getattr(module, "__dict__", None)) is not None
                for key, value in tuple(namespace.items())
                if (after := _replacement(name, value)) is not None
            ]
        return self._found


def _replacement(module: str, value: object) -> object:
    if type(value) in (_LOCK, _RLOCK) and _is_of_application(module):
        return Lock(_thread.allocate_lock if type(value) is _LOCK else _thread.RLock, value)
    return REPLACEMENTS.get(id(value))


def _is_of_application(module: str) -> bool:
    """Whether a lock of `module` may be held at a decision point, which is so for one of the standard library."""
    return module == "concurrent.futures.thread" or module.partition(".")[0] not in sys.stdlib_module_names


_found = _Found()
_INITS = {kind: _numbered(kind) for kind in (threading.Thread, concurrent.futures.Future)}
_MISSING = object()
_refusing = False


def _others() -> list[tuple[Any, str, Any]]:
    """Replacements in one place each: (place, name, value). Names of threads count anew in each schedule."""
    _numbers[-1] = itertools.count()
    return [
        *((kind, "__init__", init) for kind, init in _INITS.items()),
        *((kind, "__hash__", _hash) for kind in _INITS),
        (threading.Thread, "start", _start),
        (threading.Thread, "join", _join),
        (threading.Thread, "is_alive", _is_alive),
        (threading, "_CRLock", None),
        (threading, "_counter", itertools.count(1).__next__),
        (concurrent.futures.ThreadPoolExecutor, "_counter", itertools.count().__next__),
        (concurrent.futures._base, "id", _number),  # by which it sorts futures
        (concurrent.futures.thread, "_threads_queues", weakref.WeakKeyDictionary()),
        (sys.modules[__name__], "_refusing", True),
    ]


@contextmanager
def replaced(values: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Sets each (place, name, value) for the time of the block."""
    values = tuple(values)
    before = [vars(place).get(name, _MISSING) for place, name, _ in values]
    try:
        for place, name, value in values:
            setattr(place, name, value)
        yield
    finally:
        for (place, name, _), value in zip(values, before, strict=True):
            if value is _MISSING:
                delattr(place, name)
            else:
                setattr(place, name, value)


@contextmanager
def standard_library_controlled(seed: int) -> Iterator[None]:
    """Within the block, the standard library is the schedule's in its threads; one at a time in a process.

    Random numbers of `random` and NumPy's global generator follow from `seed`; afterwards they go on as before.
    """
    _install_audit()
    entries = _found.all()
    numbers, numpy_numbers = random.getstate(), np.random.get_state()
    logger = logging.getLogger("concurrent.futures")
    with replaced(_others()):
        try:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            logger.addFilter(_is_no_unwinding)
            for entry in entries:
                entry.namespace[entry.name] = entry.after
            yield
        finally:
            for entry in entries:
                if entry.namespace.get(entry.name) is entry.after:
                    entry.namespace[entry.name] = entry.before
            logger.removeFilter(_is_no_unwinding)
            random.setstate(numbers)
            np.random.set_state(numpy_numbers)


def _is_no_unwinding(record: logging.LogRecord) -> bool:
    """False for what a worker of `concurrent.futures` logs when it is unwound."""
    return not (
        record.exc_info and record.exc_info[0] is not None and issubclass(record.exc_info[0], ThreadsEndedError)
    )


@functools.cache
def _install_audit() -> None:
    """Once, as an audit hook cannot be removed."""
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    """Refuse real connections and processes to threads of a schedule that has the standard library."""
    if event in _REFUSED and _refusing and current_world() is not None:
        raise _uncontrolled(f"{event}{arguments!r:.200}")


def _uncontrolled(what: str) -> DagexecError:
    return DagexecError(
        f"thread {threading.current_thread().name} uses {what} in a controlled schedule, which does not control it: "
        "replace it with something in memory for exploration"
    )


controlled.MACHINERY.update((__file__, queue.__file__, concurrent.futures.thread.__file__))
