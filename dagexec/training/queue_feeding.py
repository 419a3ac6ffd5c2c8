"""Threads that fill a blobs queue: a reader net run again and again, or an iterator of batches.

    with QueueFeeder(queue, [reader_net.run]):
        for _ in range(steps):
            train_net.run()                  # it begins with DequeueBlobs

What a reader raises closes the queue and is the cause of the error that the trainer gets from it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import numpy.typing as npt

from dagexec.core.blobs_queue import BlobsQueue
from dagexec.errors import ClosedError, OperatorError, QueueClosedError
from dagexec.platform.closing import Closing
from dagexec.platform.forking import LEFT_BEHIND, reset_after_fork
from dagexec.platform.threads import Thread, threads

__all__ = ["QueueFeeder"]

logger = logging.getLogger("dagexec")


class QueueFeeder(Closing):
    """Threads that call readers, each again and again on a thread of its own, until the queue is closed.

    A reader puts records into the queue itself: `net.run` of a net that ends with EnqueueBlobs. It is over when it
    raises StopIteration; when all are, or one fails, the queue is closed.
    """

    def __init__(self, queue: BlobsQueue, readers: Sequence[Callable[[], object]]) -> None:
        """Start the threads."""
        self.queue = queue
        self._lock = threads().owned_lock()
        self._left = len(readers)
        self._threads: list[Thread] = []
        for number, reader in enumerate(readers):
            self._threads.append(threads().start(lambda reader=reader: self._serve(reader), f"dagexec-feed-{number}"))  # type: ignore[misc]
        reset_after_fork(self, QueueFeeder._forked)

    def _forked(self) -> None:
        """In a child made by `os.fork`: nobody fills the queue."""
        self._threads.clear()
        self.queue.close(ClosedError(LEFT_BEHIND))

    @classmethod
    def of_batches(cls, queue: BlobsQueue, batches: Iterable[Sequence[npt.NDArray[Any]]]) -> Self:
        """A feeder that enqueues records from an iterator."""
        iterator = iter(batches)
        return cls(queue, [lambda: queue.enqueue(next(iterator))])

    def close(self, timeout: float = 5.0) -> None:
        """Close the queue and wait for the threads. Idempotent.

        A reader that does not come back within `timeout` seconds is left behind, and the log says so.
        """
        self.queue.close()
        deadline = threads().monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - threads().monotonic()))
            if thread.is_alive():
                logger.warning("%s is still reading and will end after it", thread.name)

    def _serve(self, reader: Callable[[], object]) -> None:
        try:
            while not self.queue.is_closed:
                reader()
        except StopIteration:
            pass
        except QueueClosedError:
            pass
        except BaseException as error:
            if not (isinstance(error, OperatorError) and isinstance(error.__cause__, QueueClosedError)):
                self.queue.close(error)
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self.queue.close()
