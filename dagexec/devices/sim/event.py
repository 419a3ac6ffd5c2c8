"""SimEvent: a place in a simulated stream, as a position that the stream's count of finished commands reaches.

Recording puts no command on a stream, and a query compares two numbers. Streams that model time record by a command
(`dagexec.devices.sim.model`), because the event needs the time at which the stream gets there.
"""

from __future__ import annotations

from collections.abc import Callable

from dagexec.core.stream import Event, EventState, Stream, StreamFailure
from dagexec.devices.sim.command_queue import CommandQueue, Mark, Outcome
from dagexec.errors import DeviceError

_INITIALIZED, _SCHEDULED = EventState.INITIALIZED, EventState.SCHEDULED
_SUCCESS, _FAILED = EventState.SUCCESS, EventState.FAILED


_HOST = Outcome()  # the host never fails


class SimEvent(Event):
    """An event of simulated devices; streams of every one of them may wait for it.

    Attributes:
        stream: the stream it was recorded on; None before, and for the host.
        position: the place there, see `Mark`; -1 before.
        outcome: of the commands before the place.
    """

    __slots__ = ("_mark", "outcome", "owner", "position", "stream")

    def __init__(self, owner: str) -> None:
        """`owner` names what it stands for."""
        self.owner = owner
        self.stream: CommandQueue | None = None
        self.position = -1
        self.outcome = _HOST
        self._mark: Mark | None = None

    @property
    def mark(self) -> Mark | None:
        """The place it was recorded at, None before; kept by whoever waits, as the event may be reset meanwhile."""
        if self._mark is None and self.position >= 0:
            self._mark = Mark(self.stream, self.position, self.outcome)
        return self._mark

    @property
    def time(self) -> float:
        """Virtual time of the event in seconds, once it is done."""
        return 0.0 if self._mark is None else self._mark.time

    def record(self, stream: Stream | None) -> None:
        """Mark the present end of `stream`. Raises DeviceError for a second time, and for a stream of another kind."""
        if self.position >= 0:
            raise DeviceError(f"event of {self.owner} is recorded twice in one run (state {self.query().name})")
        if stream is None:
            self.position = 0
            return
        place = getattr(stream, "place", None)
        if place is None or stream.device.kind != "sim":
            raise DeviceError(f"event of {self.owner} is a simulated device's; it cannot be recorded on {stream.name}")
        place(self)

    def recorded_at(self, mark: Mark) -> None:
        """The event is at `mark`, which will have a time."""
        self.stream, self.outcome, self._mark = mark.stream, mark.outcome, mark
        self.position = mark.position

    def query(self) -> EventState:
        position, stream = self.position, self.stream
        if position < 0:
            return _INITIALIZED
        if stream is not None and stream.done < position:
            return _SCHEDULED
        return _FAILED if self.outcome.failed_after < position else _SUCCESS

    def finish(self, timeout: float | None = None) -> bool:
        """Block the host until the event is done, and raise what failed before it."""
        mark = self.required_mark()
        stream = mark.stream
        if stream is None:
            return True
        if stream.done < mark.position and not stream.wait_until(mark.position, timeout):
            return False
        stream.host_found(self, mark)
        failure = mark.failure
        if failure is not None:
            raise failure.error
        return True

    @property
    def error(self) -> BaseException | None:
        failure = self.failure
        return None if failure is None else failure.error

    @property
    def failure(self) -> StreamFailure | None:
        """The failure that passed to the event, None unless it is FAILED."""
        mark = self.mark
        return mark.failure if mark is not None and mark.is_reached else None

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call `callback` once the event is done. Raises DeviceError when it was never recorded."""
        mark = self.required_mark()
        if mark.stream is None:
            callback()
        else:
            mark.stream.want(mark.position, callback)

    def reset(self) -> None:
        self.position = -1
        self.stream = self._mark = None
        self.outcome = _HOST

    def required_mark(self) -> Mark:
        """The place it was recorded at. Raises DeviceError when it was not."""
        mark = self.mark
        if mark is None:
            raise DeviceError(f"event of {self.owner} is waited for but was never recorded")
        return mark


def mark_of(event: Event) -> Mark | None:
    """The mark to wait for; None for an event of another kind of device, for which the host has waited then."""
    if isinstance(event, SimEvent):
        return event.required_mark()
    event.finish()
    return None
