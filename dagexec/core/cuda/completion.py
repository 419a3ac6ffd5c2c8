"""Completions: who calls back when events of a CUDA device are done.

A callback of `Event.when_done` must come promptly, may call CUDA, and must come even when the device is lost. So each
is announced twice. A host function behind the event, on a stream of its own, comes at once; but CUDA forbids calls of
CUDA in it, and leaves it out after an error of the device. And a thread, the watcher, blocks until the oldest event is
done or fails. Whichever is first tells another thread, the dispatcher, which makes the call with no lock held.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

from dagexec.core.cuda.binding import cupy
from dagexec.core.errors import ResourceError
from dagexec.core.threads import Thread, reset_after_fork, threads

if TYPE_CHECKING:
    from dagexec.core.cuda.event import CudaEvent, NativeEvent
    from dagexec.core.cuda.runtime import CudaRuntime
    from dagexec.core.cuda.stream import CudaStream

logger = logging.getLogger("dagexec")

_MOST_ANNOUNCERS = 8


class _Announcer:
    """A stream that does nothing but call host functions, and how many it has yet to call."""

    def __init__(self) -> None:
        self.native = cupy().cuda.Stream(non_blocking=True)
        self.waiting = 0


@dataclass(eq=False, slots=True)
class _Pending:
    owner: str
    stream: CudaStream | None
    native: NativeEvent
    callback: Callable[[], object]
    announcer: _Announcer


class Completions:
    """The callbacks of one device that are to come. Its two threads start with the first of them."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._numbers = itertools.count(1)
        self._announcers: list[_Announcer] = []
        self._forked()
        reset_after_fork(self, Completions._forked)

    def _forked(self) -> None:
        """In a child made by `os.fork`: the threads, and what they waited for, are the parent's."""
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._due: SimpleQueue[int | None] = SimpleQueue()
        self._watched: SimpleQueue[int | None] = SimpleQueue()
        self._threads: list[Thread] = []

    def add(self, event: CudaEvent, native: NativeEvent, callback: Callable[[], object]) -> None:
        """Call `callback` when `native`, where `event` is, is done. Raises ResourceError when no thread starts."""
        number = next(self._numbers)
        with self._lock:
            self._start()
            announcer = self._announcer()
            announcer.waiting += 1
            stream = cast("CudaStream | None", event.stream)
            self._pending[number] = _Pending(event.owner, stream, native, callback, announcer)
        try:
            api = self._runtime.api
            with self._runtime.guard():
                api.streamWaitEvent(announcer.native.ptr, native.pointer)
                api.launchHostFunc(announcer.native.ptr, self._due.put, number)
        except Exception as error:  # of the device: the watcher finds it, too
            self._runtime.device_failed(error, f"event of {event.owner}")
        self._watched.put(number)

    def _start(self) -> None:
        """Start the threads unless they run. Call with the lock held."""
        device = self._runtime.device
        for work, name in ((self._dispatch, "dispatcher"), (self._watch, "watcher"))[len(self._threads) :]:
            try:
                self._threads.append(threads().start(work, f"{device}: {name} of events"))
            except RuntimeError as error:
                raise ResourceError(f"{device}: the system starts no thread for its events: {error}") from None

    def _announcer(self) -> _Announcer:
        """The stream with the least to wait for. Call with the lock held."""
        least = min(self._announcers, key=lambda announcer: announcer.waiting, default=None)
        if least is None or (least.waiting and len(self._announcers) < _MOST_ANNOUNCERS):
            with self._runtime.guard():
                least = _Announcer()
            self._announcers.append(least)
        return least

    def _watch(self) -> None:
        """Wait for one event after the other. The next may be done by then, which costs one look."""
        self._runtime.bind_thread()
        while (number := self._watched.get()) is not None:
            pending = self._pending.get(number)
            if pending is None:
                continue
            try:
                self._runtime.api.eventSynchronize(pending.native.pointer)
            except Exception as error:
                self._runtime.device_failed(error, f"event of {pending.owner}")
            del pending
            self._due.put(number)

    def _dispatch(self) -> None:
        self._runtime.bind_thread()
        while (number := self._due.get()) is not None:
            with self._lock:
                pending = self._pending.pop(number, None)
                if pending is not None:
                    pending.announcer.waiting -= 1
            if pending is not None:
                self._call(pending)
            del pending

    def _call(self, pending: _Pending) -> None:
        try:
            if pending.stream is not None:
                pending.stream.report_times()
        except BaseException:  # an observer's
            logger.exception("%s: an observer raised", self._runtime.device)
        try:
            pending.callback()
        except BaseException:  # the thread outlives it
            logger.exception("%s: a callback of Event.when_done raised", self._runtime.device)

    def close(self) -> None:
        """End the threads, once every callback was made."""
        with self._lock:
            ending, self._threads = self._threads, []
        for thread, work in zip(reversed(ending), (self._watched, self._due), strict=False):
            cast("SimpleQueue[Any]", work).put(None)
            if thread.name != threading.current_thread().name:
                thread.join()
