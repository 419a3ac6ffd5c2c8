"""Operators on blobs queues: make, enqueue, dequeue, close (see `dagexec.core.blobs_queue`).

An operator that waits occupies its worker. It ends with an error when the queue is closed, after `timeout_secs`, and
when the run is stopped. Operators of one net on one queue run in the order of the net, on any number of workers: a
net that dequeues first what it enqueues later waits forever on all of them, and the other end belongs in another net.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dagexec.core import dtypes
from dagexec.core.arguments import Arguments
from dagexec.core.blobs_queue import BlobsQueue
from dagexec.core.dtypes import BOOL
from dagexec.core.gradient import no_gradient
from dagexec.core.node import Node
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import NO_TENSOR, UNBOUNDED, Cost, OperatorCall, TensorType
from dagexec.core.workspace import Workspace
from dagexec.errors import ArgumentError, QueueClosedError, ShapeError
from dagexec.ops.base.blocks import Array
from dagexec.ops.base.declared_types import DTYPES, SHAPES, declared_types

_TIMEOUT = "seconds to wait before it is an error; 0: as long as it takes"


@new_operator(
    "CreateBlobsQueue",
    infer=None,
    doc="Makes a bounded queue of records, each of `num_blobs` tensors. Every run makes a new one.",
    output_names=("queue",),
    args={
        "capacity": "the most records in it (default: 1)",
        "num_blobs": "tensors of a record (default: 1)",
        "field_names": "their names, for messages",
        "enforce_unique_name": "an error when the blob holds something already",
        "shapes": SHAPES + "; others are refused",
        "dtypes": DTYPES,
    },
    effects=True,
)
class CreateBlobsQueue(Operator):
    """A queue in a blob."""

    def prepare(self) -> Step:
        """Put a new queue into the output blob."""
        blobs = self.arguments.int("num_blobs", 1)
        capacity = self.arguments.int("capacity", 1)
        names = self.arguments.strings("field_names")
        types = declared_types(self.arguments, blobs, self.label)
        output = self.output_blobs[0]

        def create() -> None:
            if self.arguments.bool("enforce_unique_name") and output.value is not None:
                raise ArgumentError(f"{self.label}: blob {output.name!r} holds {output.value!r} already")
            try:
                output.value = BlobsQueue(capacity, blobs, names=names, types=types, name=f"queue {output.name!r}")
            except ValueError as error:
                raise ArgumentError(f"{self.label}: {error}") from None

        return create


def _timeout(arguments: Arguments, owner: str) -> float | None:
    seconds = arguments.float("timeout_secs", 0.0)
    if seconds < 0:
        raise ArgumentError(f"{owner}: argument 'timeout_secs' must be 0 or more, found {seconds}")
    return seconds if 0 < seconds < math.inf else None


def infer_enqueue(call: OperatorCall) -> list[TensorType]:
    """Output i has the type of input i + 1."""
    _timeout(call.arguments, call.label)
    tensors = [kind for name, kind in zip(call.definition.output, call.inputs[1:], strict=False) if name]
    outputs = len(call.definition.output)
    if call.definition.type == "SafeEnqueueBlobs":
        if outputs != len(call.inputs):
            raise call.fail(f"expected {len(call.inputs)} outputs, the blobs and the status, found {outputs}")
        return [*tensors[: outputs - 1], TensorType((), BOOL)]
    if outputs not in (0, len(call.inputs) - 1):
        raise call.fail(f"expected no outputs, or {len(call.inputs) - 1}, one for each blob; found {outputs}")
    return tensors


def _next_to_it(input_index: int, output_index: int) -> bool:
    """Output i may take the name of input i + 1."""
    return input_index == output_index + 1


def _copy_cost(_call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    nbytes = sum(kind.nbytes for kind in outputs)
    return Cost(0, nbytes, nbytes)


class _Enqueue(Operator):
    """Appends its inputs to a queue."""

    def _step(self, blobs: int) -> Step:
        arrays = [self.x(index + 1) for index in range(len(self.input_blobs) - 1)]
        targets = [self.y(index) for index in range(blobs)]
        copies = [(y, x) for y, x in zip(targets, arrays, strict=False) if y is not x]
        seconds = _timeout(self.arguments, self.label)

        def enqueue() -> None:
            for y, x in copies:
                np.copyto(y, x)
            self.handle(0, BlobsQueue).enqueue(arrays, seconds)

        return enqueue


@new_operator(
    "EnqueueBlobs",
    inputs=(2, UNBOUNDED),
    outputs=(0, UNBOUNDED),
    infer=infer_enqueue,
    doc="Appends a copy of the blobs to the queue, waiting while it is full. A closed queue is an error. "
    "Outputs, if given, are the blobs again.",
    input_names=("queue", "blobs..."),
    args={"timeout_secs": _TIMEOUT},
    inplace=_next_to_it,
    cost=_copy_cost,
    handles=(0,),
    mutates=(0,),
    effects=True,
)
class EnqueueBlobs(_Enqueue):
    """Enqueue, or fail."""

    def prepare(self) -> Step:
        return self._step(len(self.output_blobs))


@new_operator(
    "SafeEnqueueBlobs",
    inputs=(2, UNBOUNDED),
    outputs=(2, UNBOUNDED),
    infer=infer_enqueue,
    doc="As EnqueueBlobs; that the queue is closed is no error but the last output, `status`.",
    input_names=("queue", "blobs..."),
    output_names=("blobs...", "status"),
    args={"timeout_secs": _TIMEOUT},
    inplace=_next_to_it,
    cost=_copy_cost,
    handles=(0,),
    mutates=(0,),
    effects=True,
)
class SafeEnqueueBlobs(_Enqueue):
    """Enqueue, and say whether the queue was closed."""

    def prepare(self) -> Step:
        """Copy in; the status is true when that could not be done."""
        enqueue = self._step(len(self.output_blobs) - 1)
        status = self.y(len(self.output_blobs) - 1)

        def safely() -> None:
            try:
                enqueue()
                status[...] = False
            except QueueClosedError:
                status[...] = True

        return safely


def infer_dequeue(call: OperatorCall) -> list[TensorType]:
    """The types that the arguments say; the status of the safe one is a scalar."""
    _timeout(call.arguments, call.label)
    safe = call.definition.type == "SafeDequeueBlobs"
    types = declared_types(call.arguments, len(call.definition.output) - safe, call.label)
    if call.arguments.int("num_records", 1) != 1:
        raise ArgumentError(f"{call.label}: the shape of several records is not known in advance: omit 'shapes'")
    return [*(types or ()), *([TensorType((), BOOL)] if safe else ())]


class Dequeuing(Operator):
    """Takes tensors from a queue.

    What was taken when the wait for more ended in an error is kept for the next run.
    """

    def __init__(self, definition: Node, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        super().__init__(definition, workspace, index=index, net=net)
        self._taken: list[list[Array]] = []
        self._taken_from: BlobsQueue | None = None

    def receive(self, index: int, array: Array) -> None:
        """Copy one array to output `index`, whose shape is that array's unless arguments say it."""
        meta = dtypes.from_numpy(array.dtype)
        if "shapes" not in self.arguments:
            self.output(index).resize(tuple(array.shape), meta)
        target = self.y(index)
        if (target.shape, target.dtype) != (array.shape, array.dtype):
            expected = f"{dtypes.from_numpy(target.dtype)}{list(target.shape)}"
            raise ShapeError(
                f"{self.label}: expected {expected} for {self.output_blobs[index].name!r} according to its arguments, "
                f"found {meta}{list(array.shape)} in the queue"
            )
        np.copyto(target, array)

    def _queue(self, blobs: int) -> BlobsQueue:
        queue = self.handle(0, BlobsQueue)
        if queue.num_blobs != blobs:
            raise ShapeError(f"{self.label}: expected {queue.num_blobs} blobs, as {queue!r} has them; found {blobs}")
        return queue

    def _dequeue(self, blobs: int) -> None:
        def take(record: Sequence[Array]) -> None:
            for index, array in enumerate(record):
                self.receive(index, array)

        self._queue(blobs).dequeue_into(take, _timeout(self.arguments, self.label))

    def take(self, blobs: int, records: int) -> list[list[Array]]:
        """Up to `records`; fewer when the queue is closed and empty. Raises QueueClosedError for none."""
        queue = self._queue(blobs)
        if self._taken_from is not queue:
            self._taken, self._taken_from = [], queue
        while len(self._taken) < records:
            try:
                self._taken.append(queue.dequeue(_timeout(self.arguments, self.label)))
            except QueueClosedError:
                if not self._taken:
                    raise
                break
        parts, self._taken = self._taken, []
        return parts


@new_operator(
    "DequeueBlobs",
    outputs=(1, UNBOUNDED),
    infer=infer_dequeue,
    doc="Takes the first record from the queue, waiting while it is empty. A queue that is closed and empty is an "
    "error. With `shapes`, operators behind it are prepared once, and other shapes are an error.",
    input_names=("queue",),
    output_names=("blobs...",),
    args={"timeout_secs": _TIMEOUT, "shapes": SHAPES, "dtypes": DTYPES},
    inferred_if="shapes",
    cost=_copy_cost,
    handles=(0,),
    mutates=(0,),
    effects=True,
    reproducible=False,
)
class DequeueBlobs(Dequeuing):
    """Dequeue, or fail."""

    def prepare(self) -> Step:
        blobs = len(self.output_blobs)
        declared_types(self.arguments, blobs, self.label)
        return lambda: self._dequeue(blobs)


@new_operator(
    "SafeDequeueBlobs",
    outputs=(2, UNBOUNDED),
    infer=infer_dequeue,
    doc="As DequeueBlobs; that the queue is closed and empty is no error but the last output, `status`, and the "
    "blobs stay as they are; one that the failure of a reader closed is an error still. Several records are joined "
    "along their first axis: all there are, once it is closed. Those taken before a timeout are of the next run.",
    input_names=("queue",),
    output_names=("blobs...", "status"),
    args={
        "num_records": "records to take (default: 1)",
        "timeout_secs": _TIMEOUT,
        "shapes": SHAPES,
        "dtypes": DTYPES,
    },
    inferred_if="shapes",
    cost=_copy_cost,
    handles=(0,),
    mutates=(0,),
    effects=True,
    reproducible=False,
)
class SafeDequeueBlobs(Dequeuing):
    """Dequeue, and say whether the queue was closed."""

    def prepare(self) -> Step:
        """Copy out; the status is true when nothing was there to take."""
        blobs = len(self.output_blobs) - 1
        declared_types(self.arguments, blobs, self.label)
        records = self.arguments.int("num_records", 1)
        if records < 1:
            raise ArgumentError(f"{self.label}: argument 'num_records' must be 1 or more, found {records}")
        take = self._dequeue if records == 1 else lambda blobs: self._dequeue_many(blobs, records)

        def safely() -> None:
            try:
                take(blobs)
                closed = False
            except QueueClosedError as error:
                if error.__cause__ is not None:
                    raise
                closed = True
                for blob in range(blobs):
                    if self.output(blob).is_empty:
                        self.output(blob).resize(NO_TENSOR.shape, NO_TENSOR.meta)
            self.output(blobs).resize((), BOOL)
            self.y(blobs)[...] = closed

        return safely

    def _dequeue_many(self, blobs: int, records: int) -> None:
        """Take up to `records`, and join them."""
        parts = self.take(blobs, records)
        for index, arrays in enumerate(zip(*parts, strict=True)):
            if any(array.ndim == 0 or array.shape[1:] != arrays[0].shape[1:] for array in arrays):
                shapes = ", ".join(str(array.shape) for array in arrays)
                raise ShapeError(f"{self.label}: records cannot be concatenated along their first axis: {shapes}")
            self.receive(index, np.concatenate(arrays))


@new_operator(
    "CloseBlobsQueue",
    infer=lambda _call: [],
    doc="Closes the queue: it takes no more records, and who waits for one that will not come goes on.",
    input_names=("queue",),
    handles=(0,),
    mutates=(0,),
    effects=True,
)
class CloseBlobsQueue(Operator):
    """The end of a queue."""

    def prepare(self) -> Step:
        return lambda: self.handle(0, BlobsQueue).close()


no_gradient(
    "CreateBlobsQueue", "EnqueueBlobs", "SafeEnqueueBlobs", "DequeueBlobs", "SafeDequeueBlobs", "CloseBlobsQueue"
)
