"""All planted bugs."""

from __future__ import annotations

from tests.planted import counts, deep, memory, stopped, streams, waits, wakeups
from tests.planted.bug import Bug

BUGS: tuple[Bug, ...] = (
    *waits.BUGS,
    *wakeups.BUGS,
    *counts.BUGS,
    *stopped.BUGS,
    *streams.BUGS,
    *memory.BUGS,
    *deep.BUGS,
)
