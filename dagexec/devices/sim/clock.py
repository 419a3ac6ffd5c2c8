"""The virtual clock of simulated devices: a time in seconds for every host thread; streams have theirs.

Times go forward by what `SimSettings` says a launch, a kernel and a copy take, never by themselves:

- launch: host time += launch_seconds; the kernel starts at max(stream time, host time) and ends `seconds` later;
- event: its time is the stream's when the stream gets there;
- wait: stream time = max(stream time, event time); the same for a host thread that finishes an event.
"""

from __future__ import annotations

import threading


class _HostClock(threading.local):
    time = 0.0


_clock = _HostClock()


def host_time() -> float:
    """The calling thread's virtual time in seconds."""
    return _clock.time


def set_host_time(seconds: float) -> None:
    """Put the calling thread's virtual time to `seconds`."""
    _clock.time = seconds


def spend_host_time(seconds: float) -> float:
    """Let the calling thread's virtual time go on by `seconds`; the new time."""
    _clock.time += seconds
    return _clock.time


def host_waited_until(seconds: float) -> None:
    """The calling thread has waited for something that was done at `seconds`."""
    if seconds > _clock.time:
        _clock.time = seconds
