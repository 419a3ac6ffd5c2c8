"""The calling thread's current stream of CUDA, as launches need it: a pointer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def launching_on(stream: Any) -> Iterator[None]:
    """Within it, the calling thread's launches go to `stream`, a CudaStream."""
    before = current.stream, current.stream_pointer
    current.stream, current.stream_pointer = stream, stream.pointer
    try:
        yield
    finally:
        current.stream, current.stream_pointer = before
