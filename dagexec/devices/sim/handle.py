"""LibraryHandle: a handle of a device library, such as cuDNN's, that notices when two use it at once.

A thread uses it within `with handle:`. Work of a stream uses it between two kernels that `used_on` launches, so that
work of another stream that comes between is noticed too, whoever launched it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dagexec.core.stream import Kernel, Stream
from dagexec.errors import DeviceError
from dagexec.platform.forking import ProcessLock


class LibraryHandle:
    """A handle with the name `name`. Who may use it must be settled elsewhere; here it is only checked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = ProcessLock()
        self._on_host: str | None = None
        self._on_device: tuple[str, Stream] | None = None

    def __enter__(self) -> LibraryHandle:
        """Begin to use the handle on this thread. Raises DeviceError, naming both users, while another uses it."""
        user = f"thread {threading.current_thread().name}"
        with self._lock.own:
            if self._on_host is not None:
                raise DeviceError(f"the handle of {self.name} is used by {user} while {self._on_host} is using it")
            self._on_host = user
        return self

    def __exit__(self, *_error: object) -> None:
        with self._lock.own:
            self._on_host = None

    @contextmanager
    def used_on(self, stream: Stream, user: str) -> Iterator[None]:
        """What is launched on `stream` in the block uses the handle, in the name of `user`.

        Where another stream's use is not over when this one begins, the stream fails with a DeviceError naming both.
        """
        stream.launch(Kernel(lambda: self._begin(stream, user), f"{user} begins to use the handle of {self.name}"))
        try:
            yield
        finally:
            stream.launch(Kernel(self._end, f"{user} stops using the handle of {self.name}"))

    def _begin(self, stream: Stream, user: str) -> None:
        with self._lock.own:
            if self._on_device is not None and self._on_device[1].failure is None:
                other, place = self._on_device
                raise DeviceError(
                    f"the handle of {self.name} is used by {user} on {stream.name} while {other} is using it on "
                    f"{place.name}"
                )
            self._on_device = (user, stream)

    def _end(self) -> None:
        with self._lock.own:
            self._on_device = None
