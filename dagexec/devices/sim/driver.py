"""Who does the work of simulated streams, and when.

A driver is told of streams that have something to do (`notify`), and picks which continues; where a host thread waits,
the driver is what it waits in. `ThreadDriver` works at once, on real threads. `SeededDriver` puts work off until
somebody wants a result, then lets a seed decide, command by command, which stream continues.

A stream has two flags that belong to its driver: `parked`, it had nothing to do when last looked at, and `blocked`, it
stands for an event. `notify` is called when a stream that may be either has something to do. A driver that never
clears `parked` is notified of every launch.
"""

from __future__ import annotations

import random
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable

from dagexec.core.stream import Priority
from dagexec.devices.sim.command_queue import CommandQueue, Driver, Subscribe
from dagexec.errors import ClosedError, DeviceError, ResourceError
from dagexec.platform.arithmetic import operator_arithmetic
from dagexec.platform.forking import reset_after_fork
from dagexec.platform.locks import Lock, new_lock
from dagexec.platform.threads import Thread, threads


class _OnDevice(threading.local):
    working = False


_on_device = _OnDevice()


def is_device_thread() -> bool:
    """True on a thread that is doing a device's work: in a kernel, or in a callback of `Event.when_done`."""
    return _on_device.working


def enter_device() -> None:
    """Say that the calling thread does a device's work from now on."""
    _on_device.working = True


def _wait_at_gate(ready: Callable[[], bool], timeout: float | None, subscribe: Subscribe) -> bool:
    if is_device_thread():
        raise DeviceError("a kernel, or a callback of Event.when_done, waits for the device: that never would end")
    gate = new_lock()
    gate.acquire()
    subscribe(gate.release)
    return gate.acquire(timeout=-1 if timeout is None else min(max(timeout, 0), threading.TIMEOUT_MAX)) or ready()


class ThreadDriver(Driver):
    """Real threads, at most one a stream, started as they are needed.

    A thread stays with a stream until that has nothing to do or stands for an event, then takes another stream that
    can go on, one of high priority first. Of threads that sleep while streams are ready, one at a time is woken: as it
    gets to run it wakes the next, so short work that unblocks other short work costs no change of threads.
    """

    def __init__(self, name: str = "sim") -> None:
        """`name` begins the names of the threads."""
        self._name = name
        self._lock = new_lock()
        self._high: deque[CommandQueue] = deque()
        self._normal: deque[CommandQueue] = deque()
        self._sleeping: list[Lock] = []
        self._threads: list[Thread] = []
        self._streams = 0
        self._waking = False
        self._closed = False
        reset_after_fork(self, ThreadDriver._forked)

    def _forked(self) -> None:
        """In a child made by `os.fork`: the threads are the parent's. New ones are started for new work."""
        self._lock = new_lock()
        self._sleeping, self._threads, self._waking = [], [], False

    def attach(self, stream: CommandQueue) -> None:
        """One more thread may be needed."""
        with self._lock:
            if self._closed:
                raise ClosedError(f"{stream.name}: the device was closed")
            self._streams += 1

    def detach(self, stream: CommandQueue) -> None:
        """One thread less may be needed."""
        with self._lock:
            self._streams -= 1

    def notify(self, stream: CommandQueue) -> None:
        """Put `stream` in line unless it is there, or in the hands of a thread."""
        with self._lock:
            if not (stream.parked or stream.blocked):
                return
            stream.parked = stream.blocked = False
            (self._high if stream.priority is Priority.HIGH else self._normal).append(stream)
            call = self._next_call()
        if call is not None:
            call()

    def wait(self, ready: Callable[[], bool], timeout: float | None, subscribe: Subscribe) -> bool:
        return _wait_at_gate(ready, timeout, subscribe)

    def wanted(self) -> None:
        """Nothing to do: no work is put off."""

    def close(self) -> None:
        """End and join the threads."""
        with self._lock:
            self._closed = True
            gates, self._sleeping = self._sleeping, []
        for gate in gates:
            gate.release()
        for thread in self._threads:
            thread.join()

    def _next_call(self) -> Callable[[], object] | None:
        """What brings a thread to the streams in line, None when one is on its way. Call with the lock held."""
        if self._waking or not (self._high or self._normal):
            return None
        if self._sleeping:
            self._waking = True
            return self._sleeping.pop().release
        if len(self._threads) < self._streams and not self._closed:
            self._waking = True
            return self._start
        return None

    def _start(self) -> None:
        with self._lock:
            number = len(self._threads)
        try:
            thread = threads().start(self._serve, f"{self._name}: device thread {number}")
        except RuntimeError as error:
            with self._lock:
                self._waking = False
            if not self._threads:
                raise ResourceError(f"{self._name}: the system cannot start a thread for the device: {error}") from None
            return
        self._threads.append(thread)

    def _serve(self) -> None:
        enter_device()
        with operator_arithmetic():
            self._serve_streams()

    def _serve_streams(self) -> None:
        gate = new_lock()
        gate.acquire()
        woken = True
        while True:
            stream: CommandQueue | None = None
            call = None
            with self._lock:
                if woken:
                    self._waking = False
                if self._high:
                    stream = self._high.popleft()
                elif self._normal:
                    stream = self._normal.popleft()
                if stream is not None:
                    call = self._next_call()
                elif self._closed:
                    return
                else:
                    self._sleeping.append(gate)
            if stream is None:
                gate.acquire()
                woken = True
                continue
            woken = False
            if call is not None:
                call()
            self._work(stream)

    def _work(self, stream: CommandQueue) -> None:
        """Do what `stream` can do; when this returns it is parked, blocked, or back in line."""
        while True:
            stream.drain()
            if stream.has_work():
                stream.watch_head()
                stream.blocked = True
                if not stream.can_advance():
                    return
            else:
                stream.parked = True
                if not stream.has_work():
                    return
            with self._lock:
                if not (stream.parked or stream.blocked):
                    return
                stream.parked = stream.blocked = False


class SeededDriver(Driver):
    """One thread, and a seed that decides which stream does its next command whenever more than one can.

    Nothing is done until a host thread waits or a callback is registered, so that all that may be in any order
    is there to choose from. From the same commands on the same streams a seed makes the same order.
    """

    alone = True

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._random = random.Random(seed)
        self._lock = new_lock()
        self._ready: list[CommandQueue] = []  # by `order`, whatever the order they were notified in
        self._gate = new_lock()
        self._gate.acquire()
        self._thread: Thread | None = None
        self._sleeps = False
        self._waiting = 0
        self._wants = 0
        self._closed = False
        reset_after_fork(self, SeededDriver._forked)

    def _forked(self) -> None:
        """In a child made by `os.fork`: the thread is the parent's. A new one is started for new work."""
        self._lock, self._gate = new_lock(), new_lock()
        self._gate.acquire()
        self._thread, self._sleeps, self._waiting = None, False, 0

    def attach(self, stream: CommandQueue) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError(f"{stream.name}: the device was closed")

    def detach(self, stream: CommandQueue) -> None:
        """Nothing to do: an idle stream is not among those to choose from."""

    def notify(self, stream: CommandQueue) -> None:
        """Have `stream` among those to choose from."""
        with self._lock:
            if not (stream.parked or stream.blocked):
                return
            stream.parked = stream.blocked = False
            insort(self._ready, stream, key=_order)
            sleeps = self._called()
        if sleeps:
            self._gate.release()

    def wait(self, ready: Callable[[], bool], timeout: float | None, subscribe: Subscribe) -> bool:
        """Have the work done that was put off, and sleep until called."""
        with self._lock:
            self._waiting += 1
            sleeps = self._called()
        if sleeps:
            self._gate.release()
        try:
            return _wait_at_gate(ready, timeout, subscribe)
        finally:
            with self._lock:
                self._waiting -= 1

    def wanted(self) -> None:
        """Have the work done that was put off."""
        with self._lock:
            self._wants += 1
            sleeps = self._called()
        if sleeps:
            self._gate.release()

    def satisfied(self) -> None:
        """Put work off again, if nobody else wants any."""
        with self._lock:
            self._wants -= 1

    def close(self) -> None:
        """End and join the thread."""
        with self._lock:
            self._closed = True
            sleeps, self._sleeps = self._sleeps, False
        if sleeps:
            self._gate.release()
        if self._thread is not None:
            self._thread.join()

    def _called(self) -> bool:
        """True when the thread sleeps and there is reason to wake it. Call with the lock held."""
        if not (self._ready and (self._waiting or self._wants)):
            return False
        if self._thread is None:
            try:
                self._thread = threads().start(self._serve, f"sim: seed {self.seed}")
            except RuntimeError as error:
                raise ResourceError(f"sim: the system cannot start a thread for the device: {error}") from None
            return False
        sleeps, self._sleeps = self._sleeps, False
        return sleeps

    def _serve(self) -> None:
        enter_device()
        with operator_arithmetic():
            self._serve_streams()

    def _serve_streams(self) -> None:
        while True:
            with self._lock:
                stream = self._choose() if self._waiting or self._wants else None
                if stream is None:
                    if self._closed:
                        return
                    self._sleeps = True
            if stream is None:
                self._gate.acquire()
                continue
            if stream.can_advance():
                stream.advance()
            if not stream.can_advance():
                self._set_aside(stream)

    def _choose(self) -> CommandQueue | None:
        """The stream that continues, None when none can. Call with the lock held."""
        ready = self._ready
        if not ready:
            return None
        chosen = ready[int(self._random.random() * len(ready))]
        if chosen.priority is Priority.HIGH:
            return chosen
        high = [s for s in ready if s.priority is Priority.HIGH and s.device == chosen.device]
        return self._random.choice(high) if high else chosen

    def _set_aside(self, stream: CommandQueue) -> None:
        """Take `stream`, which had nothing it could do, out of the choice until it is notified."""
        if stream.has_work():
            stream.watch_head()
            with self._lock:
                if not stream.can_advance():
                    stream.blocked = True
                    self._ready.remove(stream)
        else:
            with self._lock:
                stream.parked = True
                self._ready.remove(stream)
            if stream.has_work():
                self.notify(stream)


def _order(stream: CommandQueue) -> tuple[int, int]:
    return stream.order
