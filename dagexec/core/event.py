"""Event: the mark that says how far asynchronous work has come. One belongs to the last operator of a chain.

States go INITIALIZED -> SCHEDULED -> SUCCESS or FAILED. Host work is done when it returns, so a host event goes to
SUCCESS as it is recorded and nobody has to block on it.
"""

from __future__ import annotations

import enum

from dagexec.core.errors import DeviceError


class EventState(enum.IntEnum):
    """How far the work before an event has come."""

    INITIALIZED = 0
    SCHEDULED = 1
    SUCCESS = 2
    FAILED = 3


_INITIALIZED, _SUCCESS = EventState.INITIALIZED, EventState.SUCCESS


class HostEvent:
    """The event of a chain that runs on the host."""

    __slots__ = ("owner", "state")

    def __init__(self, owner: str) -> None:
        """`owner` names the chain in errors."""
        self.owner = owner
        self.state = _INITIALIZED

    def record(self) -> None:
        """Mark the work before as done. Raises DeviceError when it was recorded already in this run."""
        if self.state is not _INITIALIZED:
            raise DeviceError(f"event of {self.owner} is recorded twice in one run (state {self.state.name})")
        self.state = _SUCCESS

    def query(self) -> EventState:
        """The state now, without blocking."""
        return self.state

    def finish(self) -> None:
        """Return once the work is done. Raises DeviceError when the event was never recorded or has failed."""
        if self.state is not _SUCCESS:
            raise DeviceError(f"event of {self.owner} is waited for in state {self.state.name}; expected SUCCESS")

    def reset(self) -> None:
        """Back to INITIALIZED, for the next run."""
        self.state = _INITIALIZED
