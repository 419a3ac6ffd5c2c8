"""Content: which values lie where in a buffer that several tensors share, so that it can be laid into another."""

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
    """Spans in order, without overlaps. Neighbors with consecutive values are one span."""

    spans: tuple[ByteRange, ...]

    @staticmethod
    def of(spans: Iterable[ByteRange]) -> Content:
        """The content made of `spans`, which do not overlap."""
        result: list[ByteRange] = []
        for span in sorted(spans, key=lambda span: span.start):
            last = result[-1] if result else None
            if last and (last.end, last.owner, last.origin) == (span.start, span.owner, span.origin):
                result[-1] = ByteRange(last.start, span.end, span.owner, span.origin)
            else:
                result.append(span)
        return Content(tuple(result))

    def part(self, start: int, end: int, shift: int = 0) -> list[ByteRange]:
        """The content from `start` up to `end`, moved by `shift` bytes."""
        return [
            ByteRange(max(span.start, start) + shift, min(span.end, end) + shift, span.owner, span.origin + shift)
            for span in self.spans
            if span.start < end and span.end > start
        ]

    def contains(self, spans: Iterable[ByteRange]) -> bool:
        """True when all of `spans` are part of the content."""
        for span in spans:
            place = bisect_right(self.spans, span.start, key=lambda other: other.start) - 1
            container = self.spans[place] if place >= 0 else None
            if (
                container is None
                or (container.owner, container.origin) != (span.owner, span.origin)
                or span.end > container.end
            ):
                return False
        return True

    def filled(self, nbytes: int, owner: int) -> Content:
        """The content in a buffer of `nbytes` whose free bytes belong to `owner`, whose byte 0 is at 0."""
        spans, end = list(self.spans), 0
        for span in (*self.spans, ByteRange(nbytes, nbytes, owner, 0)):
            if span.start > end:
                spans.append(ByteRange(end, span.start, owner, 0))
            end = max(end, span.end)
        return Content.of(spans)
