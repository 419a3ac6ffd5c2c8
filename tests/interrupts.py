"""Ctrl-C at a chosen point of the calling thread."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


class InterruptedAtPoints:
    """Raises KeyboardInterrupt where the interpreter looks for signals, at each such point of a call in turn.

    That is when a function of Python begins and when a call of one in C returns, in files whose path contains one of
    `parts`.
    """

    def __init__(self, *parts: str) -> None:
        self._parts = parts
        self._looks = 0
        self.point = -1

    def __call__(self, attempt: Callable[[], object], fewest: int = 15) -> None:
        """Make `attempt`, which calls `look` once, again and again until there are no more points to interrupt it at.

        Every interruption must come out of it.
        """
        interrupted = True
        while interrupted:
            self.point += 1
            self._looks = 0
            try:
                attempt()
                interrupted = False
            except KeyboardInterrupt:
                interrupted = True
        assert self._looks <= self.point, f"the interrupt at point {self.point} was swallowed"
        assert self.point > fewest

    def look(self, call: Callable[[], object]) -> None:
        """Make `call`, and interrupt it at the point whose turn it is."""

        def profile(frame: FrameType, event: str, _argument: object) -> None:
            path = frame.f_code.co_filename
            if event in ("call", "c_return") and any(part in path for part in self._parts):
                self._looks += 1
                if self._looks == self.point + 1:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        sys.setprofile(profile)
        try:
            call()
        finally:
            sys.setprofile(None)
