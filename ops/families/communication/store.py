"""Stores of values by key, which processes find each other by: files in a folder, or a Redis server.

What waits for a key looks again and again, as others may set it from anywhere.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dagexec.errors import DagexecError, StorageError
from dagexec.platform.disk import make_folders
from dagexec.platform.files import write_atomically

STORE_TIMEOUT = 30.0
"""Seconds that `get` and `wait` wait for a key."""

_PAUSE = 0.01
"""Seconds between two looks."""


class Store(ABC):
    """Values by key."""

    def __init__(self, timeout: float = STORE_TIMEOUT) -> None:
        self._timeout = timeout

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Keep a value, in place of one that is there."""

    @abstractmethod
    def add(self, key: str, value: int) -> int:
        """Add to a counter, which begins at 0, and return its value. Raises StorageError for what is no number."""

    @abstractmethod
    def read(self, key: str) -> bytes | None:
        """The value, or None while there is none."""

    def get(self, key: str) -> bytes:
        """The value, as soon as it is there. Raises StorageError when it does not come in time."""
        deadline = time.monotonic() + self._timeout
        while (value := self.read(key)) is None:
            if time.monotonic() > deadline:
                raise StorageError(f"nobody has set key {key!r}; waited {self._timeout:g} s")
            time.sleep(_PAUSE)
        return value

    def wait(self, keys: Iterable[str]) -> None:
        """Return when all keys have values. Raises as `get`."""
        for key in keys:
            self.get(key)


class FileStore(Store):
    """A file for each key in a folder that all processes see."""

    def __init__(self, folder: Path, prefix: str = "", timeout: float = STORE_TIMEOUT) -> None:
        """Make the folder where it is not there. Raises StorageError where that cannot be done."""
        super().__init__(timeout)
        self._folder, self._prefix = folder, prefix
        try:
            make_folders(folder)
        except OSError as error:
            raise StorageError(f"{folder}: {error.strerror}") from None

    def _path(self, key: str) -> Path:
        return self._folder / quote(f"{self._prefix}/{key}" if self._prefix else key, safe="")

    def set(self, key: str, value: bytes) -> None:
        """In one step."""
        write_atomically(self._path(key), value)

    def add(self, key: str, value: int) -> int:
        """Under a lock of the operating system, beside the file."""
        import fcntl  # which Windows does not have

        path = self._path(key)
        with open(f"{path}%lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            total = _number(key, self.read(key)) + value
            self.set(key, str(total).encode())
        return total

    def read(self, key: str) -> bytes | None:
        """The content of the file."""
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"{self._path(key)}: {os.strerror(error.errno or 0)}") from None


def _number(key: str, value: bytes | None) -> int:
    try:
        return int(value or b"0")
    except ValueError:
        raise StorageError(f"key {key!r} holds no number") from None


class RedisStore(Store):
    """The keys of a Redis server, through the package `redis`."""

    def __init__(self, host: str, port: int, prefix: str = "", timeout: float = STORE_TIMEOUT) -> None:
        """Raises DagexecError where the package is not installed, and StorageError for no such server."""
        super().__init__(timeout)
        try:
            import redis
        except ImportError:
            raise DagexecError("stores in Redis need the package `redis`: pip install redis") from None
        self._prefix = prefix
        self._failure: type[Exception] = redis.RedisError
        self._client: Any = redis.Redis(host=host, port=port)
        self._call("ping")

    def _call(self, name: str, *arguments: object) -> Any:
        try:
            return getattr(self._client, name)(*arguments)
        except self._failure as error:
            raise StorageError(f"Redis: {error}") from None

    def set(self, key: str, value: bytes) -> None:
        """SET."""
        self._call("set", self._prefix + key, value)

    def add(self, key: str, value: int) -> int:
        """INCRBY."""
        return int(self._call("incrby", self._prefix + key, value))

    def read(self, key: str) -> bytes | None:
        """GET."""
        found: bytes | None = self._call("get", self._prefix + key)
        return found
