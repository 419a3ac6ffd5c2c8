"""Work that touches the same memory with nothing between: found by vector clocks, whatever order it was done in.

A clock gives, for each stream, how many of its pieces of work are certainly before. A stream's clock takes in that of
every event it waits for, and what the host has seen done.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tests.cuda.emulated.errors import RaceError
from tests.cuda.emulated.memory import Block

Clock = dict[Any, int]
_MAX_ACCESSES = 512


def merge(clock: Clock, other: Clock) -> None:
    """`clock` is now after all that `other` is after."""
    for key, count in other.items():
        if clock.get(key, 0) < count:
            clock[key] = count


@dataclass(frozen=True, slots=True)
class Touch:
    """Bytes `begin` to `end` (addresses) of a block are read, or written."""

    block: Block
    begin: int
    end: int
    writes: bool


@dataclass(frozen=True, slots=True)
class _Access:
    label: str
    place: tuple[Any, int]
    clock: Clock
    touch: Touch


class Races:
    """The races of a machine.

    Attributes:
        found: one line for each pair.
        asked: somebody looked.
    """

    def __init__(self) -> None:
        self.found: list[str] = []
        self.asked = False
        self._pairs: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def check(self, label: str, place: tuple[Any, int], clock: Clock, touches: Iterable[Touch], known: Clock) -> None:
        """Work with this place and clock was done, and touched this."""
        with self._lock:
            for touch in touches:
                access = _Access(label, place, clock, touch)
                accesses = touch.block.accesses
                for other in accesses:
                    if self._conflict(access, other):
                        self._report(access, other)
                if len(accesses) > _MAX_ACCESSES:
                    accesses[:] = [one for one in accesses if known.get(one.place[0], 0) < one.place[1]]
                accesses.append(access)

    @staticmethod
    def _conflict(one: _Access, other: _Access) -> bool:
        if not (one.touch.writes or other.touch.writes) or one.place == other.place:
            return False
        if one.touch.end <= other.touch.begin or other.touch.end <= one.touch.begin:
            return False
        after = one.clock.get(other.place[0], 0) >= other.place[1]
        before = other.clock.get(one.place[0], 0) >= one.place[1]
        return not (after or before)

    def _report(self, one: _Access, other: _Access) -> None:
        pair = (one.label, other.label) if one.label < other.label else (other.label, one.label)
        if pair in self._pairs:
            return
        self._pairs.add(pair)
        first, second = one.touch, other.touch
        begin = max(first.begin, second.begin) - first.block.ptr
        end = min(first.end, second.end) - first.block.ptr
        how = ["reads", "writes"]
        self.found.append(
            f"{one.label} on stream {_name(one.place[0])} {how[first.writes]} and {other.label} on stream "
            f"{_name(other.place[0])} {how[second.writes]} bytes {begin} to {end} of a {first.block}, "
            "with nothing between"
        )

    def raise_unasked(self) -> None:
        """Raises RaceError when there are races and nobody looked."""
        if self.found and not self.asked:
            raise RaceError("\n".join(self.found))


def _name(key: Any) -> str:
    return f"{key:#x}" if isinstance(key, int) else str(key)
