"""HelpingWait: how an operator waits for a run of another user of the pool that it runs on.

If all workers waited, none would be left for what they wait for. So a worker that waits works for that user, on any of
the user's runs with ready chains, since one of them may hold the net that the awaited run needs. It works for no other
user, whose runs might need what the waiting operator holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dagexec.platform.threads import ThreadWait, acquire, threads
from dagexec.scheduler.run.fair_share import Share


class HelpingWait(ThreadWait):
    """The wait of a pool's worker, in an operator, for a run charged to `share`.

    Attributes:
        share: the user that it works for meanwhile.
    """

    __slots__ = ("_enter", "_help", "_leave", "share")

    def __init__(
        self,
        share: Share,
        enter: Callable[[HelpingWait], object],
        help_once: Callable[[Share], bool],
        leave: Callable[[HelpingWait], object],
    ) -> None:
        """`help_once` works on a run, False if there is none; from `enter` to `leave`, `look` announces new ones."""
        super().__init__()
        self.share = share
        self._enter = enter
        self._help = help_once
        self._leave = leave

    def look(self) -> None:
        """There may be work. Called from any thread."""
        try:
            self._gate.release()
        except RuntimeError:
            return  # it will look anyway

    def wait(self, seconds: float = -1) -> bool:
        """Work until `notify` is called; False when that did not happen within `seconds` (-1: no limit)."""
        now = threads().monotonic
        deadline = math.inf if seconds < 0 else now() + seconds
        self._enter(self)
        try:
            while not self._notified and now() < deadline:
                if not self._help(self.share):
                    acquire(self._gate, -1 if seconds < 0 else max(0.0, deadline - now()))
            return self._notified
        finally:
            self._leave(self)
