"""CommandQueue: the commands of a simulated stream in order, how far they are done, and who asked to be told.

Places are counts of commands: `launched` by the host, `done` by whoever does the work, the `Driver`. Those that come
with dagexec are in `dagexec.devices.sim.driver`; what the host asks of a stream is in `dagexec.devices.sim.stream`.
"""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from typing import Any, Protocol

from dagexec.core.device import Device
from dagexec.core.stream import Event, Kernel, Priority, Stream, StreamFailure, StreamObserver, at_work, new_failure
from dagexec.devices.sim.clock import set_host_time
from dagexec.errors import DeviceError
from dagexec.platform.forking import ProcessLock
from dagexec.platform.threads import ThreadsEndedError

logger = logging.getLogger("dagexec")

NEVER = sys.maxsize
Subscribe = Callable[[Callable[[], object]], object]


class Outcome:
    """What became of the commands of a stream between two resets.

    Attributes:
        failed_after: the last position that was reached without a failure, NEVER while there is none.
        failure: the failure.
    """

    __slots__ = ("failed_after", "failure")

    def __init__(self) -> None:
        self.failed_after = NEVER
        self.failure: StreamFailure | None = None

    @staticmethod
    def failed(failure: StreamFailure) -> Outcome:
        """Of what is asked of a stream that failed before."""
        outcome = Outcome()
        outcome.failed_after, outcome.failure = -1, failure
        return outcome


class Mark:
    """A place in a stream. An event that is reset and recorded again has another; who waits keeps the one he asked for.

    Attributes:
        stream: the stream; None for the host, which is always past its marks.
        position: how many commands of the stream come before.
        outcome: tells whether one of them failed.
        time: virtual time at which the stream got there; valid once it has.
    """

    __slots__ = ("outcome", "position", "stream", "time")

    def __init__(self, stream: CommandQueue | None, position: int, outcome: Outcome, time: float = 0.0) -> None:
        self.stream = stream
        self.position = position
        self.outcome = outcome
        self.time = time

    @property
    def is_reached(self) -> bool:
        """True when everything before was done or skipped."""
        return self.stream is None or self.stream.done >= self.position

    @property
    def failure(self) -> StreamFailure | None:
        """What failed before the mark, once it is reached."""
        return self.outcome.failure if self.outcome.failed_after < self.position else None


class Wait:
    """A command: go on only when `mark` is reached. With `order_only`, a failure before the mark does not pass on."""

    __slots__ = ("mark", "order_only")

    def __init__(self, mark: Mark, order_only: bool) -> None:
        self.mark = mark
        self.order_only = order_only


class TimedWait(Wait):
    """A wait that moves the stream's time to the mark's, and of which an observer is told."""

    __slots__ = ("_event", "_observer")

    def __init__(self, mark: Mark, order_only: bool, event: Event, observer: StreamObserver | None) -> None:
        super().__init__(mark, order_only)
        self._event = event
        self._observer = observer

    def reached(self, stream: CommandQueue) -> None:
        """`stream` continues."""
        start = stream.time
        stream.time = max(start, self.mark.time)
        if self._observer is not None:
            self._observer.waited(stream, self._event, start, stream.time)


class Command(Protocol):
    """What a queue holds beside waits: a Kernel, or something else with a label and a step."""

    @property
    def step(self) -> Callable[[], object]:
        """Does it."""

    @property
    def label(self) -> str:
        """Names it."""


class Driver(ABC):
    """Does the work of the streams attached to it.

    Attributes:
        alone: it does one thing at a time, whatever waits.
    """

    alone: bool = False

    @abstractmethod
    def attach(self, stream: CommandQueue) -> None:
        """`stream` is new."""

    @abstractmethod
    def detach(self, stream: CommandQueue) -> None:
        """`stream`, which is idle, will not be used any more."""

    @abstractmethod
    def notify(self, stream: CommandQueue) -> None:
        """`stream` may be able to go on: it has new work, what it stood for is done, or it was abandoned.

        Called with no lock held, by host threads and by threads that do a device's work.
        """

    @abstractmethod
    def wait(self, ready: Callable[[], bool], timeout: float | None, subscribe: Subscribe) -> bool:
        """Block the calling host thread until `ready()`; False after `timeout` seconds.

        `subscribe(callback)` has `callback` called once, by whoever does the device's work, as soon as `ready()` holds.
        """

    @abstractmethod
    def wanted(self) -> None:
        """Somebody will be called back when work is done: do it, even though no thread waits, until `satisfied`."""

    def satisfied(self) -> None:  # noqa: B027 - most drivers put no work off
        """Somebody who wanted work done is about to be called back. Comes once for every `wanted`."""

    def close(self) -> None:  # noqa: B027 - a driver may have no threads
        """End the threads, if there are any. The streams are idle."""


class CommandQueue(Stream):
    """A stream as drivers and events see it.

    Attributes:
        driver: does the work.
        order: device index and number, for a choice that does not depend on who came first.
        launched: commands asked for since the stream was made.
        done: commands done or skipped.
        outcome: of the commands since the last reset.
        parked, blocked: the driver's, see `dagexec.devices.sim.driver`.
        time: virtual time in seconds; stays 0 unless the stream is timed.
    """

    def __init__(self, device: Device, number: int, priority: Priority, driver: Driver) -> None:
        self.device = device
        self.name = f"{device} stream {number}"
        self.priority = priority
        self.driver = driver
        self.alone = driver.alone
        self.order = (device.index, number)
        self.launched = 0
        self.done = 0
        self.outcome = Outcome()
        self.parked = True
        self.blocked = False
        self.time = 0.0
        self._queue: deque[Any] = deque()
        self._append = self._queue.append
        self._not_launches = 0
        self._lock = ProcessLock()
        self._watched: list[_Watch] = []
        self._next_watch = NEVER  # the position at which there is more to do than the next command
        self._abandoned: StreamFailure | None = None

    @property
    @abstractmethod
    def is_timed(self) -> bool:
        """True when commands move the stream's time."""

    @abstractmethod
    def host_found(self, event: Event, mark: Mark) -> None:
        """The calling host thread has waited for `event`, recorded here, and found it done."""

    def command(self, command: Wait | Command) -> None:
        """Append what is no launch."""
        self._not_launches += 1
        self.enqueue(command)

    def enqueue(self, command: Wait | Command) -> None:
        """Append any command."""
        self.launched += 1
        self._append(command)
        if self.parked:
            self.driver.notify(self)

    def wait_until(self, position: int, timeout: float | None) -> bool:
        """Block the host until `done` is `position`."""
        return self.driver.wait(lambda: self.done >= position, timeout, partial(self.watch, position))

    @property
    def is_idle(self) -> bool:
        """True when all commands are done or skipped."""
        return self.done >= self.launched

    @property
    def failure(self) -> StreamFailure | None:
        """The first failure since the last reset."""
        return self.outcome.failure or self._abandoned

    def abandon(self, error: BaseException) -> None:
        """Fail with `error`, unless the stream is idle or has failed. Waits and hangs end now, a kernel in its time."""
        with self._lock.own:
            if self.outcome.failure is None and self._abandoned is None:
                self._abandoned = new_failure(self.name, error)
                self.failing = True
            self._next_watch = -1
            if self.is_idle:  # asked last, as it may have become so just now
                self._abandoned = None
                self.failing = self.outcome.failure is not None
                return
        self.driver.notify(self)
        self.want(self.launched, _nothing)

    def reset(self) -> None:
        """Forget the failure. Raises DeviceError while there is work on the stream."""
        with self._lock.own:
            if self.done < self.launched:
                raise DeviceError(f"{self.name} cannot be reset: {self.launched - self.done} commands are not done")
            if self.outcome.failure is not None or self._abandoned is not None:
                self._abandoned = None
                self.outcome = Outcome()
                self.failing = False

    def watch(self, position: int, callback: Callable[[], object]) -> None:
        """Call `callback` once when `done` is `position`: at once, or later by whoever does the work."""
        watch = _Watch(position, callback)
        with self._lock.own:
            heappush(self._watched, watch)
            if position < self._next_watch:
                self._next_watch = position
        if self.done >= position:
            with self._lock.own:
                callback_left = watch.take()
            if callback_left is not None:
                callback_left()

    def want(self, position: int, callback: Callable[[], object]) -> None:
        """`watch`, and have the driver go on until then."""
        driver = self.driver

        def satisfied() -> None:
            driver.satisfied()
            callback()

        driver.wanted()
        self.watch(position, satisfied)

    # The driver's side: by one thread at a time

    def has_work(self) -> bool:
        """True when there is a command."""
        return bool(self._queue)

    def can_advance(self) -> bool:
        """True when the first command can be done, or skipped, now."""
        try:
            head = self._queue[0]
        except IndexError:
            return False
        return not isinstance(head, Wait) or self._may_start(head) or self.failing

    @property
    def head(self) -> Wait | Command:
        """The first command. Raises IndexError when there is none."""
        head: Wait | Command = self._queue[0]
        return head

    def next_start(self) -> float:
        """Virtual time at which the first command can start, infinity when it cannot."""
        if not self.can_advance():
            return float("inf")
        head = self._queue[0]
        earliest = head.mark.time if isinstance(head, Wait) else getattr(head, "issued", 0.0)
        return max(self.time, earliest)

    def watch_head(self) -> None:
        """Have the driver notified when the first command, which cannot be done now, can be."""
        head = self._queue[0]
        if isinstance(head, Wait) and head.mark.stream is not None and head.mark.position != NEVER:
            other = head.mark.stream
            watch = other.watch if other.driver is self.driver else other.want
            watch(head.mark.position, partial(self.driver.notify, self))

    def advance(self) -> None:
        """Do the first command, or pass over all of them when the stream has failed."""
        at_work.stream = self
        if self.failing:
            self._pass_over()
        else:
            self._do(self._queue.popleft())
            self.done += 1
        self._attend()

    def drain(self) -> None:
        """Do commands until there are none or the first cannot be done."""
        at_work.stream = self
        if self.failing:
            self._pass_over()
            self._attend()
            return
        queue, popleft = self._queue, self._queue.popleft
        while queue:
            command = popleft()
            if command.__class__ is not Kernel and isinstance(command, Wait):
                if not self._may_start(command):
                    queue.appendleft(command)
                    return
                self._go_on(command)
            else:
                try:
                    command.step()
                except BaseException as error:  # whatever a kernel raises belongs to the stream
                    self._fail(new_failure(command.label, error))
            self.done += 1
            if self.done >= self._next_watch:
                self._attend()
                if self.failing:
                    self._pass_over()
                    self._attend()
                    return

    def _may_start(self, wait: Wait) -> bool:
        mark = wait.mark
        return mark.stream is None or mark.stream.done >= mark.position

    def _go_on(self, wait: Wait) -> None:
        """What `wait` stood for is done."""
        if isinstance(wait, TimedWait):
            try:
                wait.reached(self)
            except BaseException as error:  # an observer's
                self._fail(new_failure(self.name, error))
        mark = wait.mark
        if not wait.order_only and mark.outcome.failed_after < mark.position and mark.outcome.failure is not None:
            self._fail(mark.outcome.failure)

    def _do(self, command: Any) -> None:
        """Do one command that can be done."""
        if isinstance(command, Wait):
            self._go_on(command)
            return
        try:
            command.step()
        except BaseException as error:  # whatever a kernel raises belongs to the stream
            self._fail(new_failure(command.label, error))

    def _fail(self, failure: StreamFailure) -> None:
        """What is after `done` commands has failed."""
        with self._lock.own:
            if self.outcome.failure is None:
                self.outcome.failed_after = self.done
                self.outcome.failure = failure
                self.failing = True
            self._next_watch = -1

    def _pass_over(self) -> None:
        """Drop every command without doing it."""
        with self._lock.own:
            abandoned, self._abandoned = self._abandoned, None
            if abandoned is not None and self.outcome.failure is None:
                self.outcome.failed_after = self.done
                self.outcome.failure = abandoned
        if self.outcome.failure is None:
            return
        queue = self._queue
        while queue:
            queue.popleft()
            self.done += 1

    def _attend(self) -> None:
        """Call back those whose position is reached."""
        due = []
        with self._lock.own:
            watched = self._watched
            while watched and watched[0].position <= self.done:
                callback = heappop(watched).take()
                if callback is not None:
                    due.append(callback)
            self._next_watch = -1 if self.failing else watched[0].position if watched else NEVER
        if due and self.is_timed:
            set_host_time(self.time)  # what the callbacks let go on continues no earlier than this
        for callback in due:
            try:
                callback()
            except ThreadsEndedError:
                raise
            except BaseException:  # whoever does the device's work outlives it
                logger.exception("%s: a callback of Event.when_done raised", self.name)

    def outcome_from_here(self) -> Outcome:
        """The outcome for a mark that is made now."""
        failure = self.failure
        return self.outcome if failure is None else Outcome.failed(failure)


def _nothing() -> None:
    """Nobody to call back."""


class _Watch:
    """A callback to be made when a position is reached. Ordered by position."""

    __slots__ = ("callback", "position")

    def __init__(self, position: int, callback: Callable[[], object]) -> None:
        self.position = position
        self.callback: Callable[[], object] | None = callback

    def __lt__(self, other: _Watch) -> bool:
        return self.position < other.position

    def take(self) -> Callable[[], object] | None:
        """The callback, for whoever comes first."""
        callback, self.callback = self.callback, None
        return callback
