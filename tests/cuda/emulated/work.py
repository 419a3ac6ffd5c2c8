"""What the machine behind the stand-ins works with: streams, events, what is asked of them, and captures of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dagexec.devices.sim.event import SimEvent
from dagexec.devices.sim.stream import SimStream
from tests.cuda.emulated.races import Clock, Touch

Step = Callable[[], "list[Touch] | None"]


@dataclass
class Operation:
    """Work for a stream.

    Attributes:
        step: does it, and tells what it touched.
        touches: what it will touch, when that is known beforehand.
        computes: it is a kernel, or a library's: no copy, and nothing of the host.
        clock: what happens before it.
        place: its stream and number there, as clocks count.
    """

    label: str
    step: Step
    device: int
    touches: list[Touch] | None = None
    computes: bool = False
    copied_bytes: int = 0
    clock: Clock = field(default_factory=dict)
    place: tuple[Any, int] = (0, 0)


class EmulatedStream:
    """A stream: its clock, its simulated stream where there is one, and the capture it takes part in."""

    def __init__(self, handle: int, device: int, flags: int, priority: int, sim: SimStream | None) -> None:
        self.handle, self.device, self.flags, self.priority, self.sim = handle, device, flags, priority, sim
        self.clock: Clock = {}
        self.count = 0
        self.capture: Capture | None = None
        self.last: list[int] = []
        self.lock = threading.RLock()

    @property
    def is_blocking(self) -> bool:
        """True when it is in order with the legacy default stream."""
        return not self.flags & 1


class EmulatedEvent:
    """An event: where it was recorded last."""

    def __init__(self, handle: int, device: int, flags: int) -> None:
        self.handle, self.device, self.flags = handle, device, flags
        self.sim: SimEvent | None = None
        self.clock: Clock = {}
        self.captured: tuple[Capture, list[int]] | None = None
        self.seconds: list[float] = []
        self.stream: EmulatedStream | None = None


@dataclass
class Node:
    """Work of a graph, after other nodes. `stream` is the number of the stream it was captured on."""

    operation: Operation | None
    after: list[int]
    stream: int


class Capture:
    """What is asked of a stream that is captured, and of those that joined it."""

    def __init__(self, origin: EmulatedStream) -> None:
        self.origin = origin
        self.streams = [origin]
        self.thread = threading.get_ident()
        self.nodes: list[Node] = []
        self.invalid = False

    def add(self, stream: EmulatedStream, operation: Operation | None) -> None:
        """`operation` is the next on `stream`."""
        self.nodes.append(Node(operation, list(stream.last), self.streams.index(stream)))
        stream.last = [len(self.nodes) - 1]

    def unjoined(self) -> bool:
        """True when a stream has work that its origin does not wait for."""
        reached: set[int] = set()
        todo = list(self.origin.last)
        while todo:
            node = todo.pop()
            if node not in reached:
                reached.add(node)
                todo += self.nodes[node].after
        return len(reached) < len(self.nodes)
