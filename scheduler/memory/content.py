"""Content: whose values lie where in a buffer that several tensors share, so that one can be laid into another."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from dagexec.platform.records import dataclass


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes from `start` up to `end` of a buffer that hold values of `owner`, whose byte 0 would be at `origin`."""

    start: int
    end: int
    owner: int
    origin: int


@dataclass(frozen=True)
class Content:
    """Spans in order, without overlaps. Neighbors that go on with the same values are one span."""

    spans: tuple[ByteRange, ...]

    @staticmethod
    def of(spans: Iterable[ByteRange]) -> Content:
        """The content made of `spans`, which do not overlap."""
        found: list[ByteRange] = []
        for span in sorted(spans, key=lambda span: span.start):
            last = found[-1] if found else None
            if last and (last.end, last.owner, last.origin) == (span.start, span.owner, span.origin):
                found[-1] = ByteRange(last.start, span.end, span.owner, span.origin)
            else:
                found.append(span)
        return Content(tuple(found))

    def part(self, start: int, end: int, shift: int = 0) -> list[ByteRange]:
        """What lies from `start` up to `end`, moved by `shift` bytes."""
        return [
            ByteRange(max(span.start, start) + shift, min(span.end, end) + shift, span.owner, span.origin + shift)
            for span in self.spans
            if span.start < end and span.end > start
        ]

    def contains(self, spans: Iterable[ByteRange]) -> bool:
        """True when all of `spans` hold here what they say."""
        for span in spans:
            place = bisect_right(self.spans, span.start, key=lambda one: one.start) - 1
            found = self.spans[place] if place >= 0 else None
            if found is None or (found.owner, found.origin) != (span.owner, span.origin) or span.end > found.end:
                return False
        return True

    def filled(self, nbytes: int, owner: int) -> Content:
        """The same in a buffer of `nbytes`, all that is free belonging to `owner`, whose byte 0 is at 0."""
        spans, end = list(self.spans), 0
        for span in (*self.spans, ByteRange(nbytes, nbytes, owner, 0)):
            if span.start > end:
                spans.append(ByteRange(end, span.start, owner, 0))
            end = max(end, span.end)
        return Content.of(spans)
