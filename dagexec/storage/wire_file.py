"""A file that is a message, field by field: large values stay in the file until they are read."""

from __future__ import annotations

import os

from dagexec.storage.wire import FIXED32, FIXED64, LENGTH, VARINT, WireError, read_varint

_WINDOW = 1 << 16  # bytes read at a time
_MAX_HEAD = 20  # bytes of a field's number and length

Field = tuple[int, int, int, int, int]
"""Number and wire type, where the field starts in the file, and where its value, without a length, starts and ends."""


class WireFile:
    """The bytes of a file, of which a window is in memory."""

    def __init__(self, descriptor: int, size: int) -> None:
        """`descriptor` is of the open file, `size` its bytes."""
        self._descriptor = descriptor
        self.size = size
        self._start = 0
        self._window = b""

    def read(self, start: int, end: int) -> bytes:
        """The bytes from `start` to `end`. Raises WireError where the file has fewer."""
        content = os.pread(self._descriptor, end - start, start)
        if len(content) != end - start:
            raise WireError(f"the file ends before byte {end}")
        return content

    def fields(self, start: int, end: int) -> list[Field]:
        """The fields of the message from `start` to `end`. Raises WireError."""
        fields: list[Field] = []
        while start < end:
            place = start - self._start
            if not 0 <= place <= len(self._window) - _MAX_HEAD:
                self._window = os.pread(self._descriptor, _WINDOW, start)
                self._start, place = start, 0
            window = self._window
            try:
                tag = window[place]
                tag, place = (tag, place + 1) if tag < 0x80 else read_varint(window, place)
                kind = tag & 7
                begin = self._start + place
                if kind == LENGTH:
                    size = window[place]
                    size, place = (size, place + 1) if size < 0x80 else read_varint(window, place)
                    begin = self._start + place
                    stop = begin + size
                elif kind == VARINT:
                    stop = begin + 1 if window[place] < 0x80 else self._start + read_varint(window, place)[1]
                elif kind in (FIXED32, FIXED64):
                    stop = begin + (4 if kind == FIXED32 else 8)
                else:
                    raise WireError(f"wire type {kind} at byte {start}")
            except IndexError:
                raise WireError(f"the file ends in the field at byte {start}") from None
            if stop > end:
                raise WireError(f"the field at byte {start} ends after its message")
            fields.append((tag >> 3, kind, start, begin, stop))
            start = stop
        return fields
