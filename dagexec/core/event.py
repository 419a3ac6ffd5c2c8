"""Event: the mark that says how far asynchronous work has come. One belongs to the last operator of a chain.

States go INITIALIZED -> SCHEDULED -> SUCCESS or FAILED. Host work is done when it returns, so a host event goes to
SUCCESS as it is recorded and nobody has to block on it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from dagexec.core.runtime import Event, Stream
from dagexec.errors import DeviceError


class EventState(enum.IntEnum):
    """How far the work before an event has come."""

    INITIALIZED = 0
    SCHEDULED = 1
    SUCCESS = 2
    FAILED = 3


_INITIALIZED, _SUCCESS = EventState.INITIALIZED, EventState.SUCCESS


class HostEvent(Event):
    """The event of work on the host, such as a chain that runs there.

    Attributes:
        state: how far it is.
        stream: the host stream it was recorded on, None for the host at large.
    """

    __slots__ = ("_failed", "owner", "state", "stream")

    def __init__(self, owner: str) -> None:
        """`owner` names the chain in errors."""
        self.owner = owner
        self.state = _INITIALIZED
        self.stream: Stream | None = None
        self._failed: BaseException | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Mark the work before as done; the event is FAILED when `stream` is. Raises DeviceError for a second time."""
        if self.state is not _INITIALIZED:
            raise DeviceError(f"event of {self.owner} is recorded twice in one run (state {self.state.name})")
        if stream is None:
            self.state = _SUCCESS
        else:
            self._record_on(stream)

    def _record_on(self, stream: Stream) -> None:
        if stream.device.kind != "cpu":
            raise DeviceError(f"event of {self.owner} is one of the host; it cannot be recorded on {stream.name}")
        take = getattr(stream, "captures", None)
        if take is not None and take(self):
            return
        self.stream = stream
        self._failed = None if stream.failure is None else stream.failure.error
        self.state = _SUCCESS if self._failed is None else EventState.FAILED

    def query(self) -> EventState:
        """The state now, without blocking."""
        return self.state

    def finish(self, timeout: float | None = None) -> bool:
        """Return at once. Raises DeviceError when the event was never recorded, or what made it FAILED."""
        if self._failed is not None:
            raise self._failed
        if self.state is not _SUCCESS:
            raise DeviceError(f"event of {self.owner} is waited for in state {self.state.name}; expected SUCCESS")
        return True

    @property
    def error(self) -> BaseException | None:
        """What failed before the event, None unless it is FAILED."""
        return self._failed

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call `callback` at once. Raises DeviceError when the event was never recorded."""
        if self.state is _INITIALIZED:
            raise DeviceError(f"event of {self.owner} is waited for in state {self.state.name}; expected SUCCESS")
        callback()

    def reset(self) -> None:
        """Back to INITIALIZED, for the next run."""
        self.state = _INITIALIZED
        self.stream = None
        self._failed = None
