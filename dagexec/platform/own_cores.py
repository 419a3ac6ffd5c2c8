"""Cores of a machine, shared out among processes that compute side by side and know nothing of each other.

Some kernels leave two processes on one core for long while another is idle, as those of small virtual machines do. A
process that takes cores holds a name in the abstract namespace of sockets for each, which the system lets go when the
process ends, however it ends. Several processes take one core only when each core is taken as often.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys

_MAX_SHARERS = 64


class OwnCores:
    """Cores that this process has taken.

    Attributes:
        cores: their numbers; none where the system offers no such thing.
    """

    def __init__(self, count: int, group: str = "dagexec") -> None:
        """Take `count` of the cores that this thread may run on, those that the fewest others of the group have taken.

        All of them are there for everybody.
        """
        self._group = group
        self.cores: set[int] = set()
        self._names: list[socket.socket] = []
        if sys.platform != "linux":
            return
        allowed = sorted(os.sched_getaffinity(0))
        if count >= len(allowed):
            self.cores = set(allowed)
            return
        for sharers, core in itertools.product(range(_MAX_SHARERS), allowed):
            if core not in self.cores and self._take(f"{core}-{sharers}"):
                self.cores.add(core)
                if len(self.cores) == count:
                    return

    def use(self) -> None:
        """This thread, and those that it starts from now on, run on these cores alone."""
        if self.cores:
            os.sched_setaffinity(0, self.cores)

    def close(self) -> None:
        """Let others take them. Threads stay where they are."""
        while self._names:
            self._names.pop().close()

    def _take(self, name: str) -> bool:
        held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            held.bind(f"\0{self._group}-cores-{os.getuid()}-{name}")
        except OSError:
            held.close()
            return False
        self._names.append(held)
        return True
