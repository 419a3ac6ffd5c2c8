"""LibraryHandle: a handle of a device library, such as cuDNN's, that notices when two use it at once.

A thread uses it within `with handle:`.
"""

from __future__ import annotations

import threading

from dagexec.errors import DeviceError
from dagexec.platform.forking import ProcessLock


class LibraryHandle:
    """A handle with the name `name`. Who may use it must be settled elsewhere; here it is only checked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = ProcessLock()
        self._on_host: str | None = None

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
