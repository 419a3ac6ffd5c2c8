"""The calling thread's current stream of CUDA, as launches need it: a pointer."""

from __future__ import annotations

import threading
from typing import Any


class _Current(threading.local):
    """Of the calling thread: the stream that launches go to, and its pointer; 0 is CUDA's default stream.

    Attributes:
        stream: the CudaStream whose kernel is being launched, None outside of a launch.
        stream_pointer: its cudaStream_t.
        devices: those whose context the thread has been bound to; see `CudaRuntime.bind_thread`.
    """

    stream_pointer: int = 0
    stream: Any = None
    devices: frozenset[int] = frozenset()


current = _Current()
