"""Threads of Python that feed a net: `init_data_input_workers` adds a queue that they fill, and that the net reads.

def fetch(worker_id, batch_size):
    return [images, labels]                # arrays with any number of rows

coordinator = data_workers.init_data_input_workers(net, ["data", "label"], fetch, batch_size=32)
coordinator.start()
workspace.RunNet(net, 100)
coordinator.stop()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.caffe2 import workspace
from dagexec.caffe2.net import Net
from dagexec.caffe2.references import BlobReference
from dagexec.core.blobs_queue import BlobsQueue
from dagexec.errors import Caffe2Error
from dagexec.training.queue_feeding import QueueFeeder

__all__ = ["DataInputCoordinator", "init_data_input_workers"]

Array = npt.NDArray[Any]
Fetch = Callable[[int, int], Sequence[Array] | None]


class DataInputCoordinator:
    """The threads that fill a queue."""

    def __init__(
        self,
        queue: BlobsQueue,
        readers: Sequence[Callable[[], object]],
        init_fun: Callable[..., object] | None = None,
    ) -> None:
        self._queue = queue
        self._init = init_fun
        self._readers = readers
        self._feeder: QueueFeeder | None = None

    def start(self) -> None:
        """Start the threads. Raises Caffe2Error when they were started before."""
        if self._feeder is not None:
            raise Caffe2Error("the data workers were started already")
        if self._init is not None:
            self._init(self, self)
        self._feeder = QueueFeeder(self._queue, self._readers)

    def stop(self) -> None:
        """Close the queue, and wait for the threads to end. A net that reads from it fails from here on."""
        if self._feeder is not None:
            self._feeder.close()

    stop_coordinator = stop


class _Rows:
    """What a thread has fetched, in batches."""

    def __init__(self, fetch: Fetch, worker: int, batch_size: int, columns: Sequence[str], queue: BlobsQueue) -> None:
        self._fetch = fetch
        self._worker = worker
        self._batch_size = batch_size
        self._columns = columns
        self._queue = queue
        self._left: list[Array] = []

    def __call__(self) -> None:
        """Fetch once, and enqueue what makes whole batches; what is left goes with the next ones.

        Raises StopIteration when nothing is fetched any more, Caffe2Error for arrays that do not fit the blobs.
        """
        arrays = self._fetch(self._worker, self._batch_size)
        if arrays is None:
            raise StopIteration
        made = [np.asarray(array) for array in arrays]
        if len(made) != len(self._columns) or len({array.shape[:1] for array in made}) != 1 or not made[0].ndim:
            found = [array.shape for array in made]
            raise Caffe2Error(
                f"data workers: expected arrays with equally many rows for {self._columns}, found {found}"
            )
        rows = [np.concatenate(parts) for parts in zip(self._left, made, strict=True)] if self._left else made
        whole = len(rows[0]) // self._batch_size * self._batch_size
        for begin in range(0, whole, self._batch_size):
            self._queue.enqueue([array[begin : begin + self._batch_size] for array in rows])
        self._left = [array[whole:] for array in rows]


def init_data_input_workers(
    net: Any,
    input_blob_names: Sequence[Any],
    fetch_fun: Fetch,
    batch_size: int,
    num_worker_threads: int = 2,
    input_source_name: str = "train",
    max_buffered_batches: int = 800,
    init_fun: Callable[..., object] | None = None,
) -> DataInputCoordinator:
    """Have a net, or that of a model, begin with batches from a queue, which threads fill once they are started.

    `fetch_fun(worker_id, batch_size)` returns an array for each blob, with any number of rows; rows are put together to
    batches of `batch_size`, each from one thread, and None means that there are no more. With one thread batches come
    in order. `init_fun(coordinator, coordinator)` is called first when it starts; Caffe2 has two kinds of coordinators.
    What `fetch_fun` raises is the cause of the error that the net raises. The queue is in the current workspace.
    """
    target: Net = net if isinstance(net, Net) else net.net
    blobs = [str(blob) for blob in input_blob_names]
    queue = BlobsQueue(max_buffered_batches, len(blobs), names=blobs)
    name = f"{input_source_name}_{blobs[0]}_queue"
    workspace.hold(name, queue)
    target.DequeueBlobs(BlobReference(name), list(map(BlobReference, blobs)))
    readers = [_Rows(fetch_fun, worker, batch_size, blobs, queue) for worker in range(num_worker_threads)]
    return DataInputCoordinator(queue, readers, init_fun)
