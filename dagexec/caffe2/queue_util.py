"""Queues as pipes between tasks, and operators on them (`caffe2.python.queue_util`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dagexec.caffe2.dataio import Pipe, Read, Reader, Writer
from dagexec.caffe2.net import Net
from dagexec.caffe2.schema import Field
from dagexec.caffe2.task import TaskGroup
from dagexec.errors import Caffe2Error

__all__ = ["Queue", "QueueWrapper", "close_queue", "dequeue", "enqueue"]


class _QueueReader(Reader):
    """Takes records from a queue."""

    def __init__(self, wrapper: QueueWrapper, num_dequeue_records: int) -> None:
        """Raises Caffe2Error for a queue whose schema is not known."""
        if wrapper.schema() is None:
            raise Caffe2Error("a queue that is read from needs a schema: that of what is written to it, or its own")
        super().__init__(wrapper.schema())
        self._wrapper = wrapper
        self._records = num_dequeue_records

    def setup_ex(self, init_net: Net, finish_net: Net) -> None:
        """Close the queue behind all reading, so that no writer waits on."""
        finish_net.CloseBlobsQueue([self._wrapper.queue()], 0)

    def read_ex(self, local_init_net: Net, local_finish_net: Net) -> Read:
        """A net that waits for a record, or for the queue to be closed and empty."""
        self._wrapper._new_reader(local_init_net)
        net = Net("dequeue")
        names = self.schema().field_names()
        fields, status = dequeue(net, self._wrapper.queue(), len(names), None, names, self._records)
        return [net], status, fields


class _QueueWriter(Writer):
    """Appends records to a queue."""

    def __init__(self, wrapper: QueueWrapper) -> None:
        self._wrapper = wrapper

    def setup_ex(self, init_net: Net, finish_net: Net) -> None:
        """Close the queue behind all writing, so that no reader waits on."""
        finish_net.CloseBlobsQueue([self._wrapper.queue()], 0)

    def write_ex(self, fields: Any, local_init_net: Net, local_finish_net: Net, stop_blob: Any) -> list[Any]:
        """A net that waits for room, or for the queue to be closed."""
        self._wrapper._new_writer(self.schema(), local_init_net)
        net = Net("enqueue")
        enqueue(net, self._wrapper.queue(), fields, stop_blob)
        return [net]


class QueueWrapper(Pipe):
    """A queue in a blob, as a pipe."""

    def __init__(self, handler: Any, schema: Field | None = None, num_dequeue_records: int = 1) -> None:
        super().__init__(schema, TaskGroup.LOCAL_SETUP)
        self._queue = handler
        self._records = num_dequeue_records

    def reader(self) -> Reader:
        """What takes records, several joined where it was made so."""
        return _QueueReader(self, self._records)

    def writer(self) -> Writer:
        """What appends records."""
        return _QueueWriter(self)

    def queue(self) -> Any:
        """The blob."""
        return self._queue


class Queue(QueueWrapper):
    """A queue that the group of tasks makes which uses it.

    Attributes:
        capacity: the most records in it.
    """

    def __init__(
        self, capacity: int, schema: Field | None = None, name: str = "queue", num_dequeue_records: int = 1
    ) -> None:
        net = Net(name)
        super().__init__(net.AddExternalInput(net.NextName("handler")), schema, num_dequeue_records)
        self.capacity = capacity

    def setup(self, global_init_net: Net) -> None:
        """Add what makes it. Raises Caffe2Error where its schema is not known."""
        schema = self.schema()
        if schema is None:
            raise Caffe2Error(f"queue {str(self._queue)!r} has no schema")
        names = schema.field_names()
        global_init_net.CreateBlobsQueue(
            [], [self._queue], capacity=self.capacity, num_blobs=len(names), field_names=names
        )


def enqueue(net: Net, queue: Any, data_blobs: Sequence[Any], status: Any = None) -> Any:
    """Append blobs to a queue: the blob that says that it was closed."""
    blobs: list[Any] = []
    for blob in data_blobs:
        blobs.append(net.Copy(blob) if str(blob) in map(str, blobs) else blob)
    return net.SafeEnqueueBlobs([queue, *blobs], [*blobs, status or net.NextName("status")])[-1]


def dequeue(
    net: Net,
    queue: Any,
    num_blobs: int,
    status: Any = None,
    field_names: Sequence[str] | None = None,
    num_records: int = 1,
) -> tuple[list[Any], Any]:
    """Take blobs from a queue, and the blob that says that it was closed and empty."""
    names = [net.NextName("data", index) for index in range(num_blobs)]
    if field_names is not None:
        names = [net.NextName(name) for name in field_names]
    *fields, closed = net.SafeDequeueBlobs(queue, [*names, status or net.NextName("status")], num_records=num_records)
    return fields, closed


def close_queue(net: Net, *queues: Any) -> None:
    """Add what closes queues."""
    for queue in queues:
        net.CloseBlobsQueue([queue], 0)
