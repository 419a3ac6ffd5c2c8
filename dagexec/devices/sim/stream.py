"""SimStream: an in-order queue of work that a driver does later.

Launching appends to a deque, and the driver is told only when the stream was parked, so a launch costs a fraction of a
microsecond. Places in the stream are counts of commands: `launched` by the host, `done` by whoever does the work. A
stream is launched to by one host thread at a time, as whoever leased it sees to.

Latencies, faults and observers are the business of a `StreamModel` (`dagexec.devices.sim.model`), which puts other
commands in the queue; a stream without one has only kernels and waits there.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Protocol

from dagexec.core.device import Device
from dagexec.core.stream import Event, Kernel, Priority, Stream, StreamFailure, StreamObserver, at_work, new_failure
from dagexec.devices.sim.clock import set_host_time
from dagexec.devices.sim.driver import Driver
from dagexec.devices.sim.event import NEVER, Mark, Outcome, SimEvent
from dagexec.errors import DeviceError
from dagexec.platform.forking import ProcessLock
from dagexec.platform.threads import ThreadsEndedError

if TYPE_CHECKING:
    from dagexec.devices.sim.capture import SimCapture
    from dagexec.devices.sim.model import StreamModel

logger = logging.getLogger("dagexec")


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

    def reached(self, stream: SimStream) -> None:
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


class Route(Protocol):
    """Where commands go that a stream does not take itself."""

    def launch(self, stream: SimStream, kernel: Kernel) -> None:
        """As `Stream.launch`."""

    def wait(self, stream: SimStream, event: Event, order_only: bool) -> None:
        """As `Stream.wait`; with `order_only`, as `Stream.follow`."""

    def record(self, stream: SimStream, event: SimEvent) -> None:
        """As `Event.record`."""


class SimStream(Stream):
    """A stream of a simulated device.

    Attributes:
        driver: does the work.
        order: device index and number, for a choice that does not depend on who came first.
        launched: commands asked for since the stream was made.
        done: commands done or skipped.
        outcome: of the commands since the last reset.
        parked, blocked: the driver's, see `dagexec.devices.sim.driver`.
        model: sees to latencies, faults and observers; None when there are none.
        time: virtual time in seconds; stays 0 on a stream without a model.
    """

    def __init__(self, device: Device, number: int, priority: Priority, driver: Driver, model: StreamModel) -> None:
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
        self.model = model.observed_by(model.observer)
        self.time = 0.0
        self._device_model = model
        self._capture: SimCapture | None = None
        self._route: Route | None = self.model
        self._queue: deque[Any] = deque()
        self._append = self._queue.append
        self._not_launches = 0
        self._lock = ProcessLock()
        self._watched: list[_Watch] = []
        self._next_watch = NEVER  # the position at which there is more to do than the next command
        self._abandoned: StreamFailure | None = None

    # The host's side

    def launch(self, kernel: Kernel) -> None:
        if self._route is not None:
            self._route.launch(self, kernel)
            return
        self.launched += 1
        self._append(kernel)
        if self.parked:
            self.driver.notify(self)

    def launch_all(self, kernels: Sequence[Kernel]) -> None:
        """Append `kernels`, whose launch was paid for already."""
        if self.model is not None:
            for kernel in kernels:
                self.model.issue(self, kernel)
            return
        self.launched += len(kernels)
        self._queue.extend(kernels)
        if self.parked:
            self.driver.notify(self)

    def wait(self, event: Event) -> None:
        """Append a wait, unless the event is this stream's own past or was reached. A host event is waited for here."""
        if self._route is not None or not isinstance(event, SimEvent):
            self._wait(event, False)
            return
        source, position = event.stream, event.position
        passed = source is not None and 0 <= position <= source.done and event.outcome.failed_after >= position
        if passed or source is self:
            return
        self._wait(event, False)

    def follow(self, event: Event) -> None:
        """`wait`, but a failure before the event does not pass on."""
        self._wait(event, True)

    def _wait(self, event: Event, order_only: bool) -> None:
        if self._route is not None:
            self._route.wait(self, event, order_only)
            return
        mark = self.mark_of(event)
        if mark is None or mark.stream is self or (mark.is_reached and (order_only or mark.failure is None)):
            return
        self.command(Wait(mark, order_only))

    def mark_of(self, event: Event) -> Mark | None:
        """The mark to wait for; None for an event of another kind of device, for which the host has waited then."""
        if isinstance(event, SimEvent):
            return event.required_mark()
        event.finish()
        return None

    def place(self, event: SimEvent) -> None:
        """Mark the present end of the stream as where `event` is."""
        if self._route is not None:
            self._route.record(self, event)
            return
        event.stream = self
        event.outcome = self.outcome_from_here() if self.failing else self.outcome
        event.position = self.launched

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

    @property
    def observer(self) -> StreamObserver | None:
        """Who is told of what is asked of the stream from now on; set to None, it is the device's observer again."""
        return None if self.model is None else self.model.observer

    @observer.setter
    def observer(self, observer: StreamObserver | None) -> None:
        model = self.model
        wanted = self._device_model.observer if observer is None else observer
        if wanted is not (None if model is None else model.observer):
            self.model = self._device_model.observed_by(wanted)
            self._route = self.model if self._capture is None else self._capture

    @property
    def capture(self) -> SimCapture | None:
        """Where commands go while they are captured."""
        return self._capture

    @capture.setter
    def capture(self, capture: SimCapture | None) -> None:
        self._capture = capture
        self._route = self.model if capture is None else capture

    def synchronize(self, timeout: float | None = None) -> bool:
        """Block the host until the stream is idle. Raises DeviceError while it is captured."""
        if self._capture is not None:
            raise DeviceError(f"{self.name} is captured: what was asked of it is not done, nobody can wait for it")
        if self.done < self.launched and not self.wait_until(self.launched, timeout):
            return False
        if self.model is not None:
            self.model.host_found_idle(self)
        return True

    def wait_until(self, position: int, timeout: float | None) -> bool:
        """Block the host until `done` is `position`."""
        return self.driver.wait(lambda: self.done >= position, timeout, partial(self.watch, position))

    def host_found(self, event: SimEvent, mark: Mark) -> None:
        """The calling host thread has waited for `event`, recorded here, and found it done."""
        if self.model is not None:
            self.model.host_found(event, mark)

    @property
    def launches(self) -> int:
        """Kernels and copies among the commands asked for."""
        return self.launched - self._not_launches

    @property
    def is_captured(self) -> bool:
        """True while commands are kept, not done."""
        return self._capture is not None

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
        if due and self.model is not None:
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
