"""SimCapture: launches, records and waits of a few streams, kept in the order they were requested, to be replayed."""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.core.stream import Event, Kernel
from dagexec.devices.sim.event import SimEvent
from dagexec.devices.sim.stream import SimStream
from dagexec.errors import DeviceError


class _Kernels:
    """Consecutive launches on one stream."""

    def __init__(self, stream: SimStream) -> None:
        self.stream = stream
        self.kernels: list[Kernel] = []

    def replay(self) -> None:
        self.stream.launch_all(self.kernels)


class _Recording:
    """The recording of an event."""

    def __init__(self, stream: SimStream, event: SimEvent) -> None:
        self.stream = stream
        self.event = event

    def replay(self) -> None:
        self.event.record(self.stream)


class _Waiting:
    """A stream's wait for an event."""

    def __init__(self, stream: SimStream, event: SimEvent, order_only: bool) -> None:
        self.stream = stream
        self.event = event
        self.order_only = order_only

    def replay(self) -> None:
        wait = self.stream.follow if self.order_only else self.stream.wait
        wait(self.event)


class SimCapture:
    """What was captured. Its events are INITIALIZED after the capture, and before each replay must be so again."""

    def __init__(self, streams: Sequence[SimStream]) -> None:
        self._streams = tuple(streams)
        self._commands: list[_Kernels | _Recording | _Waiting] = []
        self._recorded: dict[int, SimEvent] = {}
        self._is_open = False

    def __len__(self) -> int:
        """Number of launches."""
        return sum(len(command.kernels) for command in self._commands if isinstance(command, _Kernels))

    def begin(self) -> None:
        """Take the commands of the streams. Raises DeviceError when one of them is captured already."""
        for stream in self._streams:
            if stream.capture is not None:
                raise DeviceError(f"{stream.name} is already being captured; captures cannot be nested")
        for stream in self._streams:
            stream.capture = self
        self._is_open = True

    def end(self) -> None:
        """Leave the streams alone."""
        for stream in self._streams:
            stream.capture = None
        for event in self._recorded.values():
            event.stream = None
        self._is_open = False

    def launch(self, stream: SimStream, kernel: Kernel) -> None:
        """Keep a launch."""
        last = self._commands[-1] if self._commands else None
        if not isinstance(last, _Kernels) or last.stream is not stream:
            last = _Kernels(stream)
            self._commands.append(last)
        last.kernels.append(kernel)

    def record(self, stream: SimStream, event: SimEvent) -> None:
        """Keep a recording. Raises DeviceError for the second one of an event."""
        if id(event) in self._recorded:
            raise DeviceError(f"event of {event.owner} is recorded twice in one capture")
        self._recorded[id(event)] = event
        event.stream = stream  # for those who ask whether they need to wait for it
        self._commands.append(_Recording(stream, event))

    def wait(self, stream: SimStream, event: Event, order_only: bool) -> None:
        """Keep a wait. Raises DeviceError for an event that is recorded outside the capture."""
        if not isinstance(event, SimEvent) or id(event) not in self._recorded:
            raise DeviceError(
                f"{stream.name} is captured and waits for the event of {event.owner}, which the capture did not "
                "record: a replay could not wait for it; wait before the capture, or capture its stream too"
            )
        self._commands.append(_Waiting(stream, event, order_only))

    def detach(self) -> None:
        """Nothing changes: the streams do the work."""

    def replay(self) -> None:
        """Launch it again, at the cost of one launch. Raises DeviceError inside the capture, or for a used event."""
        if self._is_open:
            raise DeviceError("a capture can only be replayed after it has ended")
        for event in self._recorded.values():
            if event.position >= 0:
                raise DeviceError(f"event of {event.owner} must be reset before a replay records it")
        first = self._commands[0].stream if self._commands else None
        if first is not None and first.model is not None:
            first.model.pay_launch(first, f"a capture of {len(self)} launches")
        for command in self._commands:
            command.replay()
