"""ControlledDriver: simulated streams as part of a controlled schedule.

Each stream is a thread of the schedule that executes one command of the stream whenever it is chosen, and that is a
candidate while its first command can be executed. So a strategy decides between host threads and streams alike:

    with simulated("sim:0", driver=ControlledDriver(), launch_seconds=5e-6):
        ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dagexec.devices.sim.command_queue import CommandQueue, Driver, Subscribe
from dagexec.devices.sim.driver import enter_device, is_device_thread
from dagexec.errors import DagexecError, DeviceError
from dagexec.platform.threads import threads
from dagexec.scheduler.exploration.controlled import ControlledThreads


class Advance(NamedTuple):
    """A stream does its first command, or passes over it."""

    stream: CommandQueue
    command: object


class ControlledDriver(Driver):
    """Does the work of streams in the schedule that is going on when it is made."""

    def __init__(self) -> None:
        """Raises DagexecError outside of a controlled schedule."""
        source = threads()
        if not isinstance(source, ControlledThreads):
            raise DagexecError("a controlled driver is for scenarios: make it in a function given to explore")
        self._world = source
        self._detached: set[CommandQueue] = set()

    def attach(self, stream: CommandQueue) -> None:
        """Add a thread. This is no decision point, as the device holds its lock."""
        self._world.add_actor(
            lambda: self._serve(stream), stream.name, lambda: self._may_go_on(stream), lambda: stream.next_start()
        )

    def detach(self, stream: CommandQueue) -> None:
        self._detached.add(stream)

    def notify(self, stream: CommandQueue) -> None:
        """Nothing to do: what a stream can do is looked at whenever there is a choice."""

    def wait(self, ready: Callable[[], bool], timeout: float | None, subscribe: Subscribe) -> bool:
        """A decision point. Raises DeviceError on a stream's thread, which would wait for itself."""
        if is_device_thread():
            raise DeviceError("work on a device, or a callback of Event.when_done, waits for the device")
        return self._world.wait(ready, timeout, self, "wait", "the device")

    def wanted(self) -> None:
        """Nothing to do."""

    def _may_go_on(self, stream: CommandQueue) -> bool:
        return stream.can_advance() or stream in self._detached

    def _serve(self, stream: CommandQueue) -> None:
        enter_device()
        while stream not in self._detached:
            self._world.note(Advance(stream, stream.head))
            stream.advance()
            self._world.wait(lambda: self._may_go_on(stream), None, self, "advance", stream.name)
