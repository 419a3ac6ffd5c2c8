"""TensorProtosDBInput: batches from a database whose records are TensorProtos, read ahead on a thread of its own."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.gradient import no_gradient
from dagexec.core.node import Node
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import UNBOUNDED, OperatorCall, TensorType
from dagexec.core.workspace import Workspace
from dagexec.errors import ArgumentError, ShapeError, StorageError
from dagexec.ops.base.declared_types import DTYPES, SHAPES, declared_types
from dagexec.ops.families.storage.loading import store
from dagexec.platform.forking import LEFT_BEHIND
from dagexec.platform.threads import Thread, threads
from dagexec.storage.reader import DBReader
from dagexec.storage.tensor_proto import Segment, decode_tensor
from dagexec.storage.wire import LENGTH, WireError, fields

Array = npt.NDArray[Any]


def infer_input(call: OperatorCall) -> list[TensorType]:
    """The types that the arguments say."""
    return declared_types(call.arguments, len(call.definition.output), call.label) or []


class _Prefetch:
    """A batch that is being read on another thread."""

    def __init__(self, read: Step, reader: DBReader, name: str) -> None:
        self.reader = reader
        self._read = read
        self._error: BaseException | None = None
        self._read_all = False
        self._thread: Thread = threads().start(self._run, name)

    def _run(self) -> None:
        try:
            self._read()
        except BaseException as error:
            self._error = error
        self._read_all = True

    def wait(self) -> None:
        """Until it is there. Raises what reading it raised, StorageError in a child forked while it was read."""
        self._thread.join()  # in a forked child it is over whatever it has done
        if not self._read_all:
            raise StorageError(f"{self.reader.path}: the batch that was being read is lost: {LEFT_BEHIND}")
        if self._error is not None:
            raise self._error


_operators: weakref.WeakSet[TensorProtosDBInput] = weakref.WeakSet()


@new_operator(
    "TensorProtosDBInput",
    outputs=(1, UNBOUNDED),
    infer=infer_input,
    doc="The tensors of the next record, one output each; or with `batch_size` of so many records, stacked. The "
    "next batch is read while the net works, unless other operators read from the same blob.",
    input_names=("reader",),
    output_names=("tensors...",),
    args={
        "batch_size": "records in a batch (default: 0, one record without a batch axis)",
        "prefetch": "read one batch ahead (default: 1)",
        "shapes": SHAPES,
        "dtypes": DTYPES,
    },
    inferred_if="shapes",
    handles=(0,),
    mutates=(0,),
    effects=True,
    reproducible=False,
)
class TensorProtosDBInput(Operator):
    """Tensors from records.

    Attributes:
        size: records in a batch; 0: one, without an axis for it.
        batch: what was read last, an array for each output.
    """

    def __init__(self, definition: Node, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        super().__init__(definition, workspace, index=index, net=net)
        self.batch: list[Array] = []
        self._ahead: _Prefetch | None = None
        self.size = self.arguments.int("batch_size", 0)
        if self.size < 0:
            raise ArgumentError(f"{self.label}: argument 'batch_size' must be 0 or more, found {self.size}")
        _operators.add(self)

    def prepare(self) -> Step:
        """Hand out a batch and have the next one read."""
        declared_types(self.arguments, len(self.output_blobs), self.label)
        alone = self.arguments.bool("prefetch", True)

        def next_batch() -> None:
            reader = self.handle(0, DBReader)
            ahead, self._ahead = self._ahead, None
            if ahead is not None:
                ahead.wait()
            if ahead is None or ahead.reader is not reader:
                self.read_batch(reader)
            for index, array in enumerate(self.batch):
                self._hand_out(index, array)
            if alone and sum(other.input_blobs[0] is self.input_blobs[0] for other in tuple(_operators)) == 1:
                self._ahead = _Prefetch(lambda: self.read_batch(reader), reader, f"{self.label} reads ahead")

        return next_batch

    def _hand_out(self, index: int, array: Array) -> None:
        if "shapes" in self.arguments and (self.y(index).shape, self.y(index).dtype) != (array.shape, array.dtype):
            raise ShapeError(
                f"{self.label}: expected {self.y(index).dtype}{list(self.y(index).shape)} for "
                f"{self.output_blobs[index].name!r} according to its arguments, found {array.dtype}{list(array.shape)}"
            )
        store(self, index, array)

    def read_batch(self, reader: DBReader) -> None:
        """Read one."""
        if not self.size:
            self.batch = [whole(segment) for segment in self._record(reader)]
            return
        for item in range(self.size):
            for index, segment in enumerate(self._record(reader)):
                self._put(item, index, whole(segment))

    def _put(self, item: int, index: int, array: Array) -> None:
        """Make `array` item `item` of tensor `index` of the batch."""
        if not item:
            shape = (self.size, *array.shape)
            del self.batch[len(self.output_blobs) :]
            if index >= len(self.batch):
                self.batch.append(np.empty(shape, array.dtype))
            elif (self.batch[index].shape, self.batch[index].dtype) != (shape, array.dtype):
                self.batch[index] = np.empty(shape, array.dtype)
        batch = self.batch[index]
        if (batch.shape[1:], batch.dtype) != (array.shape, array.dtype):
            raise ShapeError(
                f"{self.label}: tensor {index} of record {item} of the batch is {array.dtype}{list(array.shape)}; "
                f"expected {batch.dtype}{list(batch.shape[1:])}, like the previous records"
            )
        batch[item] = array

    @staticmethod
    def segments(value: bytes) -> list[Segment]:
        """The tensors of a record. Raises WireError, StorageError."""
        return [
            decode_tensor(content, len(value))
            for number, kind, content, _ in fields(memoryview(value))
            if number == 1 and kind == LENGTH
        ]

    def _record(self, reader: DBReader) -> list[Segment]:
        key, value = reader.read()
        try:
            found = self.segments(value)
        except (WireError, StorageError) as error:
            raise StorageError(f"{self.label}: {reader.path}: record {key[:80]!r}: {error}") from None
        if len(found) != len(self.output_blobs):
            raise ShapeError(
                f"{self.label}: {reader.path}: record {key[:80]!r} has {len(found)} tensors; "
                f"expected {len(self.output_blobs)}, one for each output"
            )
        return found


def whole(segment: Segment) -> Array:
    """The tensor of a record. Raises StorageError for a part of one."""
    if segment.values.size != np.prod(segment.shape, dtype=np.int64):
        raise StorageError(f"tensor {segment.name!r} is divided into segments; expected a complete tensor")
    return segment.values.reshape(segment.shape)


no_gradient("TensorProtosDBInput")
