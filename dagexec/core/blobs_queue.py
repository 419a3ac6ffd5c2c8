"""BlobsQueue: a bounded queue of records, each a few arrays, between threads, operators and nets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core import dtypes
from dagexec.core.dtypes import STRING
from dagexec.core.schema import TensorType
from dagexec.core.tensor import as_bytes_objects
from dagexec.errors import QueueClosedError, QueueTimeoutError, ShapeError
from dagexec.platform.blocking import wait_until
from dagexec.platform.forking import reset_after_fork
from dagexec.platform.records import dataclass
from dagexec.platform.threads import ThreadWait, acquire, threads

Array = npt.NDArray[Any]
Record = list[Array]

MAX_RECORDS, MAX_BLOBS = 1 << 20, 1 << 16


@dataclass(frozen=True)
class QueueStatistics:
    """A snapshot of a queue.

    Attributes:
        capacity: records it holds at most.
        records: those in it.
        enqueued, dequeued: since it was made.
        enqueuing, dequeuing: threads that wait to do so.
        closed: it takes no more records.
    """

    capacity: int
    records: int
    enqueued: int
    dequeued: int
    enqueuing: int
    dequeuing: int
    closed: bool


class BlobsQueue:
    """First in, first out; whoever enqueues waits while it is full, whoever dequeues while it is empty.

    Records are copied in and out, into arrays that the queue keeps, so it allocates nothing while shapes stay.
    A thread that waits for a run ends its wait when the run is stopped (see `dagexec.platform.blocking`).
    """

    def __init__(
        self,
        capacity: int = 1,
        num_blobs: int = 1,
        *,
        names: Sequence[str] = (),
        types: Sequence[TensorType] | None = None,
        name: str = "blobs queue",
    ) -> None:
        """Room for `capacity` records of `num_blobs` arrays.

        `names` of the arrays serve messages. With `types`, records of others are refused. Raises ValueError for counts
        out of range, or that do not agree.
        """
        if not (1 <= capacity <= MAX_RECORDS and 1 <= num_blobs <= MAX_BLOBS):
            raise ValueError(
                f"{name}: expected a capacity from 1 to {MAX_RECORDS:,} and from 1 to {MAX_BLOBS:,} blobs; found "
                f"{capacity}, {num_blobs}"
            )
        if (names and len(names) != num_blobs) or (types is not None and len(types) != num_blobs):
            raise ValueError(
                f"{name}: records of {num_blobs} blobs, but {len(names)} names and {len(types or ())} types are given"
            )
        self.name = name
        self.capacity = capacity
        self.num_blobs = num_blobs
        self.types = None if types is None else tuple(types)
        self._names = tuple(names) or tuple(f"blob {index}" for index in range(num_blobs))
        self._lock = threads().owned_lock()
        self._free: list[Record] = [[] for _ in range(capacity)]
        self._records: deque[Record] = deque()
        self._enqueuing: list[ThreadWait] = []
        self._dequeuing: list[ThreadWait] = []
        self._enqueued = self._dequeued = 0
        self._closed = False
        self._error: BaseException | None = None
        reset_after_fork(self, BlobsQueue._forked)

    def _forked(self) -> None:
        """In a child made by `os.fork`: threads that hold the lock or wait are the parent's."""
        self._lock = threads().owned_lock()
        self._enqueuing, self._dequeuing = [], []

    def enqueue(self, arrays: Sequence[Array], timeout: float | None = None) -> None:
        """Append a copy of `arrays`, waiting while the queue is full.

        Raises QueueClosedError, QueueTimeoutError after `timeout` seconds, ShapeError for arrays that are not those of
        a record, RunCancelledError when the run that the thread works for is stopped meanwhile.
        """
        self._check(arrays)
        with self._locked():
            if not wait_until(
                self._lock, self._enqueuing, lambda: self._closed or bool(self._free),
                f"{self.name}: to enqueue", timeout,
            ):  # fmt: skip
                raise QueueTimeoutError(f"{self.name}: still full ({self.capacity} records) after {timeout} s")
            self._refuse_if_closed("no record is taken")
            record = self._free.pop()
        try:
            _fill(record, arrays)
        except BaseException:
            with self._locked():
                self._give_back(record)
            raise
        with self._locked():
            if self._closed:
                self._free.append(record)
            self._refuse_if_closed("no record is taken")
            self._records.append(record)
            self._enqueued += 1
            _notify_all(self._dequeuing)

    def dequeue(self, timeout: float | None = None) -> list[Array]:
        """The first record, copied; see `dequeue_into`."""
        copies: list[Array] = []
        self.dequeue_into(lambda record: copies.extend(array.copy() for array in record), timeout)
        return copies

    def dequeue_into(self, take: Callable[[Sequence[Array]], object], timeout: float | None = None) -> None:
        """Have `take` copy from the first record, waiting while there is none; the arrays are the queue's.

        When `take` raises, the record stays the first. Raises QueueClosedError once the queue is closed and empty,
        QueueTimeoutError and RunCancelledError as `enqueue` does.
        """
        with self._locked():
            if not wait_until(
                self._lock, self._dequeuing, lambda: self._closed or bool(self._records),
                f"{self.name}: to dequeue", timeout,
            ):  # fmt: skip
                raise QueueTimeoutError(f"{self.name}: still empty after {timeout} s")
            if not self._records:
                self._refuse_if_closed("and there are no more records")
            record = self._records.popleft()
        try:
            take(record)
        except BaseException:
            with self._locked():
                self._records.appendleft(record)
                _notify_all(self._dequeuing)
            raise
        with self._locked():
            self._dequeued += 1
            self._give_back(record)

    def close(self, error: BaseException | None = None) -> None:
        """Take no more records; those in it can still be dequeued, and other waiting threads get QueueClosedError.

        `error` becomes the cause of these errors. Idempotent: the first one counts.
        """
        with self._locked():
            if not self._closed:
                self._error = error
            self._closed = True
            _notify_all(self._enqueuing)
            _notify_all(self._dequeuing)

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def statistics(self) -> QueueStatistics:
        """Counts at this moment."""
        with self._locked():
            return QueueStatistics(
                self.capacity, len(self._records), self._enqueued, self._dequeued, len(self._enqueuing),
                len(self._dequeuing), self._closed,
            )  # fmt: skip

    def _check(self, arrays: Sequence[Array]) -> None:
        if len(arrays) != self.num_blobs:
            raise ShapeError(f"{self.name}: a record has {self.num_blobs} blobs, found {len(arrays)}")
        for index, array in enumerate(arrays):
            meta = dtypes.from_numpy(array.dtype)
            if self.types is not None and TensorType(array.shape, meta) != self.types[index]:
                raise ShapeError(
                    f"{self.name}: {self._names[index]} must be {self.types[index]}, found {meta}{list(array.shape)}"
                )

    def _refuse_if_closed(self, then: str) -> None:
        if self._closed:
            reason = "" if self._error is None else f" by {type(self._error).__name__}: {self._error}"
            raise QueueClosedError(f"{self.name}: it is closed{reason}, {then}") from self._error

    def _give_back(self, record: Record) -> None:
        self._free.append(record)
        _notify_all(self._enqueuing)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        acquire(self._lock)
        try:
            yield
        finally:
            self._lock.release()

    def __repr__(self) -> str:
        return f"BlobsQueue({self.name!r}, {len(self._records)} of {self.capacity} records)"


def _fill(record: Record, arrays: Sequence[Array]) -> None:
    """Copy `arrays` into those of `record`, which are made again where they do not fit."""
    if len(record) != len(arrays):
        record[:] = [np.empty(0, np.uint8)] * len(arrays)
    for index, array in enumerate(arrays):
        if dtypes.from_numpy(array.dtype) is STRING:
            record[index] = as_bytes_objects(array)
            continue
        if record[index].shape != array.shape or record[index].dtype != array.dtype:
            record[index] = np.empty(array.shape, array.dtype)
        np.copyto(record[index], array)


def _notify_all(waits: list[ThreadWait]) -> None:
    """Wake all waiting threads: each checks whether it may go on, and otherwise waits again."""
    for wait in waits:
        wait.notify()
