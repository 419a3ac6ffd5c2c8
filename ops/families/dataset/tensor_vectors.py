"""Lists of tensors in blobs: a sample of what runs compute is collected, and joined in the end."""

from __future__ import annotations

import numpy as np

from dagexec.core.dtypes import INT32
from dagexec.core.gradient import no_gradient
from dagexec.core.node import Node
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.core.workspace import Workspace
from dagexec.errors import ArgumentError, ShapeError
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.storage.loading import store
from dagexec.platform.forking import ProcessLock

_MAX_VECTORS = 64


class TensorVector:
    """Arrays, each of any type.

    Attributes:
        arrays: nobody writes to one that is in here.
        lock: held while the list is changed.
    """

    def __init__(self) -> None:
        """None yet."""
        self.arrays: list[Array] = []
        self.lock = ProcessLock()


@new_operator(
    "CreateTensorVector",
    infer=None,
    doc="Makes a list of tensors, empty. Every run makes a new one.",
    output_names=("vector",),
    effects=True,
)
class CreateTensorVector(Operator):
    """A list in a blob."""

    def prepare(self) -> Step:
        """Put a new list into the output blob."""
        blob = self.output_blobs[0]

        def create() -> None:
            blob.value = TensorVector()

        return create


@new_operator(
    "CollectTensor",
    inputs=(2, 2 * _MAX_VECTORS),
    outputs=(1, _MAX_VECTORS),
    infer=None,
    doc="Adds to each list, in place, a copy of the tensor that stands as many inputs behind the lists. Once there "
    "are `num_to_collect`, one that a random generator chooses is replaced, or none, so that of all tensors seen each "
    "is as likely to be there.",
    input_names=("vectors...", "tensors..."),
    output_names=("vectors...",),
    args={"num_to_collect": "the most tensors in a list"},
    required_args=("num_to_collect",),
    inplace=lambda source, target: source == target,
    handles=tuple(range(2 * _MAX_VECTORS)),
    effects=True,
    reproducible=False,
)
class CollectTensor(Operator):
    """A sample of tensors. Vitter, 1985, algorithm R."""

    def __init__(self, definition: Node, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        """Raises ArgumentError for a size of the sample below 1."""
        super().__init__(definition, workspace, index=index, net=net)
        self._most = self.arguments.int("num_to_collect", 0)
        self._seen = 0
        if self._most < 1:
            raise ArgumentError(f"{self.label}: argument 'num_to_collect' must be 1 or more, found {self._most}")
        lists = len(definition.output)
        if list(definition.input[:lists]) != list(definition.output) or len(definition.input) != 2 * lists:
            raise ShapeError(f"{self.label}: expected {lists} lists, which are the outputs, and as many tensors")

    def prepare(self) -> Step:
        """Draw a place, the same for all lists."""

        def collect() -> None:
            place = self._seen if self._seen < self._most else int(self.random.integers(self._seen + 1))
            count = len(self.output_blobs)
            for index in range(count):
                vector, array = self.handle(index, TensorVector), self.x(count + index).copy()
                with vector.lock.own:
                    if place < len(vector.arrays):
                        vector.arrays[place] = array
                    elif place < self._most:
                        vector.arrays.append(array)
            self._seen += 1

        return collect


@new_operator(
    "ConcatTensorVector",
    infer=None,
    doc="The tensors of a list, joined along their first axis. An empty list is an error.",
    input_names=("vector",),
    output_names=("joined",),
    handles=(0,),
    reproducible=False,
)
class ConcatTensorVector(Operator):
    """One tensor of many."""

    def prepare(self) -> Step:
        """Join what is there."""

        def join() -> None:
            arrays = tuple(self.handle(0, TensorVector).arrays)
            if not arrays or any(
                not array.ndim or (array.dtype, array.shape[1:]) != (arrays[0].dtype, arrays[0].shape[1:])
                for array in arrays
            ):
                kinds = ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays[:8])
                raise ShapeError(f"{self.label}: cannot be joined along their first axis: {kinds or 'no tensors'}")
            store(self, 0, np.concatenate(arrays))

        return join


def infer_size(_call: OperatorCall) -> list[TensorType]:
    """A scalar."""
    return [TensorType((), INT32)]


@new_operator(
    "TensorVectorSize",
    infer=infer_size,
    doc="How many tensors a list has.",
    input_names=("vector",),
    output_names=("size",),
    handles=(0,),
    reproducible=False,
)
class TensorVectorSize(Operator):
    """The length of a list."""

    def prepare(self) -> Step:
        size = self.y(0)

        def count() -> None:
            size[...] = len(self.handle(0, TensorVector).arrays)

        return count


no_gradient("CreateTensorVector", "CollectTensor", "ConcatTensorVector", "TensorVectorSize")
