"""A network whose delays, losses, copies, cuts and resets a seed decides: for links of a cluster, and streams of bytes.

Messages of a cluster may come twice and overtake each other, wait until a node can be reached again, or be lost when
their connection breaks, which the sender is told. A stream keeps its bytes in order, as TCP does: it is late, comes in
pieces, or is reset. Time is that of the schedule, so waiting costs nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from dagexec.platform.threads import threads

_LONG_SECONDS = 30.0  # for which a node may be cut off
_OFTEN = 0.08
_APART = 1e-6  # seconds between pieces of a stream: calls at the same moment would have no order


class Network:
    """Carries messages to and from nodes; `heal` ends all that goes wrong.

    Attributes:
        met: what went wrong so far, by its name.
    """

    def __init__(self, chance: random.Random) -> None:
        self.met: Counter[str] = Counter()
        self._chance = chance
        self._healthy = False
        self._cut_off: dict[int, float] = {}

    def heal(self) -> None:
        """From now on all messages arrive, soon and once."""
        self._healthy = True
        self._cut_off.clear()

    def happens(self, what: str, probability: float = _OFTEN) -> bool:
        """Whether something goes wrong now."""
        occurs = not self._healthy and self._chance.random() < probability
        self.met[what] += occurs
        return occurs

    def delay(self) -> float:
        """Seconds that a message takes."""
        return self._chance.expovariate(100.0) if self._healthy else self._chance.expovariate(5.0)

    def send(self, node: int, deliver: Callable[[], object], lost: Callable[[], object] = lambda: None) -> None:
        """Call `deliver` on a thread of its own, later, perhaps twice; or `lost` instead."""
        now = threads().monotonic()
        if self.happens("partition", _OFTEN / 2):
            self._cut_off[node] = now + self._chance.uniform(1.0, _LONG_SECONDS)
        waits = max(0.0, self._cut_off.get(node, 0.0) - now)
        if self.happens("message lost"):
            threads().call_later(waits + self.delay(), lost)
            return
        for _ in range(2 if self.happens("message twice") else 1):
            threads().call_later(waits + self.delay(), deliver)


class _NoSocket:
    def setsockopt(self, *_option: object) -> None:
        """There are none."""

    def getpeername(self) -> tuple[str, int]:
        return ("client", 1)

    def getsockname(self) -> tuple[str, int]:
        return ("server", 1)


class Stream(asyncio.Transport):
    """One end of a connection on one event loop: what is written comes to the protocol of its `peer`."""

    peer: Stream

    def __init__(self, network: Network, loop: asyncio.AbstractEventLoop, protocol: Any) -> None:
        super().__init__({"socket": _NoSocket()})
        self.was_reset = False
        self._network = network
        self._loop = loop
        self._protocol = protocol
        self._arrival = 0.0  # of what was written last
        self._closing = False
        self._lost = False
        self._unread = bytearray()
        self._paused = False
        self._ended = False  # the peer writes no more

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            self._loop.call_soon(self._read)

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return True

    def write(self, data: Any) -> None:
        """Deliver it, in order and in pieces; or reset the connection."""
        if self._closing:
            return
        content = bytes(data)
        if self._network.happens("connection reset", _OFTEN / 2):
            self.reset()
        while content and not self._lost:
            size = len(content) if self._network.happens("whole", 0.5) else max(1, len(content) // 2)
            self._later(self.peer.arrived, content[:size])
            content = content[size:]

    def write_eof(self) -> None:
        """Have the peer told that nothing more comes."""
        self._later(self.peer.has_ended)

    def close(self) -> None:
        """Write no more, and be gone when all has arrived."""
        if not self._closing:
            self._closing = True
            self._later(self.peer.has_ended)
            self._later(self._gone, None)

    def abort(self) -> None:
        """Be gone at once."""
        self.reset()

    def reset(self) -> None:
        """Both ends learn that the connection is no more."""
        for end in (self, self.peer):
            end.was_reset = True
            end._closing = True
            self._loop.call_soon(end._gone, ConnectionResetError("reset"))

    def arrived(self, data: bytes) -> None:
        """The peer wrote it."""
        self._unread += data
        self._read()

    def has_ended(self) -> None:
        """The peer writes no more."""
        self._ended = True
        self._read()

    def _later(self, call: Callable[..., object], *arguments: object) -> None:
        self._arrival = max(self._arrival + _APART, self._loop.time() + self._network.delay())
        self._loop.call_at(self._arrival, call, *arguments)

    def _read(self) -> None:
        while self._unread and not self._paused and not self._lost:
            if isinstance(self._protocol, asyncio.BufferedProtocol):
                room = memoryview(self._protocol.get_buffer(-1)).cast("B")
                size = min(len(room), len(self._unread))
                room[:size] = self._unread[:size]
                del self._unread[:size]
                self._protocol.buffer_updated(size)
            else:
                data = bytes(self._unread)
                self._unread.clear()
                self._protocol.data_received(data)
        if self._ended and not (self._unread or self._lost):
            self._ended = False
            if not self._protocol.eof_received():
                self.close()

    def _gone(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = self._closing = True
            self._protocol.connection_lost(error)


def connect(
    network: Network, loop: asyncio.AbstractEventLoop, client: Callable[[], Any], server: Callable[[], Any]
) -> Stream:
    """A connection between two protocols; the client's end."""
    ends = [Stream(network, loop, protocol()) for protocol in (client, server)]
    ends[0].peer, ends[1].peer = ends[1], ends[0]
    for end in reversed(ends):
        end.get_protocol().connection_made(end)
    return ends[0]
