"""Operators on rebatching queues: blobs queues that take batches row by row, and give batches of any size."""

from __future__ import annotations

import numpy as np

from dagexec.core.blobs_queue import BlobsQueue
from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import UNBOUNDED
from dagexec.errors import ArgumentError, ShapeError
from dagexec.ops.families.control.queue import Dequeuing


@new_operator(
    "CreateRebatchingQueue",
    infer=None,
    doc="Makes a bounded queue of records, each of `num_blobs` tensors. Every run makes a new one.",
    output_names=("queue",),
    args={"capacity": "the most records in it (default: 1)", "num_blobs": "tensors of a record (default: 1)"},
    effects=True,
)
class CreateRebatchingQueue(Operator):
    """A queue in a blob."""

    def prepare(self) -> Step:
        """Put a new queue into the output blob."""
        capacity, blobs = self.arguments.int("capacity", 1), self.arguments.int("num_blobs", 1)
        output = self.output_blobs[0]

        def create() -> None:
            try:
                output.value = BlobsQueue(capacity, blobs, name=f"queue {output.name!r}")
            except ValueError as error:
                raise ArgumentError(f"{self.label}: {error}") from None

        return create


@new_operator(
    "EnqueueRebatchingQueue",
    inputs=(2, UNBOUNDED),
    infer=lambda _call: [],
    doc="Appends a copy of the tensors to the queue, or of each of their rows, waiting while it is full. A closed "
    "queue is an error.",
    input_names=("queue", "tensors..."),
    args={"enqueue_batch": "each row is a record (default 0)"},
    handles=(0,),
    mutates=(0,),
    effects=True,
)
class EnqueueRebatchingQueue(Operator):
    """Records into a queue."""

    def prepare(self) -> Step:
        """One record, or one a row. Raises ShapeError for tensors of different numbers of rows."""
        arrays = [self.x(index) for index in range(1, len(self.input_blobs))]
        if not self.arguments.bool("enqueue_batch"):
            return lambda: self.handle(0, BlobsQueue).enqueue(arrays)
        if len({array.shape[:1] for array in arrays}) != 1 or not arrays[0].ndim:
            shapes = ", ".join(str(array.shape) for array in arrays)
            raise ShapeError(f"{self.label}: expected as many rows of each tensor, found {shapes}")

        def enqueue() -> None:
            queue = self.handle(0, BlobsQueue)
            for row in range(len(arrays[0])):
                queue.enqueue([array[row, ...] for array in arrays])

        return enqueue


@new_operator(
    "DequeueRebatchingQueue",
    outputs=(1, UNBOUNDED),
    infer=None,
    doc="Takes `num_elements` records from the queue, waiting for them, and stacks them along a new first axis. Of a "
    "queue that is closed it takes those that are left; none is an error. Those taken before a run was stopped are of "
    "the next run.",
    input_names=("queue",),
    output_names=("tensors...",),
    args={"num_elements": "records to take (default: 1)"},
    handles=(0,),
    mutates=(0,),
    effects=True,
    reproducible=False,
)
class DequeueRebatchingQueue(Dequeuing):
    """A batch from a queue."""

    def prepare(self) -> Step:
        """Take, and stack. Raises ShapeError for records of different types."""
        elements = self.arguments.int("num_elements", 1)
        if elements < 1:
            raise ArgumentError(f"{self.label}: argument 'num_elements' must be 1 or more, found {elements}")

        def dequeue() -> None:
            for index, arrays in enumerate(zip(*self.take(len(self.output_blobs), elements), strict=True)):
                if any((array.dtype, array.shape) != (arrays[0].dtype, arrays[0].shape) for array in arrays):
                    kinds = ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
                    raise ShapeError(f"{self.label}: records cannot be stacked: {kinds}")
                self.receive(index, np.stack(arrays))

        return dequeue


@new_operator(
    "CloseRebatchingQueue",
    infer=lambda _call: [],
    doc="Closes the queue: it takes no more records, and who waits for one that will not come goes on.",
    input_names=("queue",),
    handles=(0,),
    mutates=(0,),
    effects=True,
)
class CloseRebatchingQueue(Operator):
    """The end of a queue."""

    def prepare(self) -> Step:
        return lambda: self.handle(0, BlobsQueue).close()


no_gradient("CreateRebatchingQueue", "EnqueueRebatchingQueue", "DequeueRebatchingQueue", "CloseRebatchingQueue")
