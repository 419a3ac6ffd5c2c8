"""Completions: who calls back when events of a CUDA device are done.

A callback of `Event.when_done` must come promptly, may call CUDA, and must come even when the device is lost. So a
thread for each event blocks in CUDA until the event is done or fails, without Python's lock, and then makes the call.

Host functions of CUDA would tell sooner, but they must not be Python's: CUDA calls them with a lock of its own held,
under which they would wait for Python's lock, while a thread that has Python's may wait for CUDA's (CuPy keeps
Python's lock while it queries a stream or an event).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from dagexec.devices.cuda.device import CudaDevice, NativeEvent
from dagexec.devices.cuda.in_flight import staged_downloads
from dagexec.devices.cuda.timing import StreamTimes
from dagexec.errors import ResourceError
from dagexec.platform.forking import reset_after_fork
from dagexec.platform.locks import new_lock
from dagexec.platform.records import dataclass
from dagexec.platform.threads import Thread, threads

logger = logging.getLogger("dagexec")

MAX_WATCHERS = 32
"""Threads that wait for events of one device at once; further events are waited for when one of those is done."""


@dataclass(eq=False, slots=True)
class _Pending:
    """An event of CUDA that a thread is to wait for, and what to call then, beside the times of its stream."""

    owner: str
    native: NativeEvent
    callbacks: list[tuple[StreamTimes | None, Callable[[], object]]]


class Completions:
    """The callbacks of one device that are to come, and as many threads as have had to wait at once."""

    def __init__(self, runtime: CudaDevice) -> None:
        self.runtime = runtime
        self._forked()
        reset_after_fork(self, Completions._forked)

    def _forked(self) -> None:
        """In a child made by `os.fork`: the threads, and what they waited for, are the parent's."""
        self._lock = new_lock()
        self._waiting: SimpleQueue[_Pending | None] = SimpleQueue()
        self._pending: dict[NativeEvent, _Pending] = {}
        self._threads: list[Thread] = []

    def add(self, owner: str, native: NativeEvent, times: StreamTimes | None, callback: Callable[[], object]) -> None:
        """Report `times` and call `callback` when `native`, which stands for `owner`, is done.

        Raises ResourceError when no thread starts.
        """
        call = times, callback
        with self._lock:
            found = self._pending.get(native)
            if found is not None:  # such as a wait that is asked again and again for a while
                found.callbacks.append(call)
                return
            if len(self._pending) >= len(self._threads) and len(self._threads) < MAX_WATCHERS:
                self._start()
            pending = self._pending[native] = _Pending(owner, native, [call])
        self._waiting.put(pending)

    def _start(self) -> None:
        """Start one more thread; the first that cannot be started is an error. Call with the lock held."""
        name = f"{self.runtime.device}: watcher {len(self._threads)} of events"
        try:
            self._threads.append(threads().start(self._watch, name))
        except RuntimeError as error:
            if not self._threads:
                device = self.runtime.device
                raise ResourceError(f"{device}: the system cannot start a thread for its events: {error}") from None

    def _watch(self) -> None:
        with contextlib.suppress(Exception):  # of a device that is lost: waiting for its events says so
            self.runtime.bind_thread()
        while (pending := self._waiting.get()) is not None:
            try:
                self.runtime.api.eventSynchronize(pending.native.pointer)
            except Exception as error:
                self.runtime.device_failed(error, f"event of {pending.owner}")
            with self._lock:
                del self._pending[pending.native]
            for times, callback in pending.callbacks:
                self._call(times, callback)
            del pending, times, callback

    def _call(self, times: StreamTimes | None, callback: Callable[[], object]) -> None:
        try:
            staged_downloads.land()
            if times is not None:
                times.report()
        except BaseException:  # an observer's
            logger.exception("%s: an observer raised", self.runtime.device)
        try:
            callback()
        except BaseException:  # the thread outlives it
            logger.exception("%s: a callback of Event.when_done raised", self.runtime.device)

    def close(self) -> None:
        """End the threads, once every callback was made."""
        with self._lock:
            ending, self._threads = self._threads, []
        for _thread in ending:
            self._waiting.put(None)
        for thread in ending:
            if thread.name != threading.current_thread().name:
                thread.join()
