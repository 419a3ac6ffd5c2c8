"""Operator: one node of a net, bound to its blobs. Subclasses in `dagexec.ops` say what is computed.

A subclass implements `prepare`: with inputs and outputs sized, it resolves views, scratch memory and constants, and
returns a step - a callable without arguments that computes the outputs once, as often as it is called. Prepared
steps call NumPy with `out=`, so a run allocates nothing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from dagexec.core.arguments import Arguments
from dagexec.core.blob import Blob
from dagexec.core.device import Context, Device, check_fits, make_context
from dagexec.core.errors import MissingBlobError
from dagexec.core.proto import OperatorDef
from dagexec.core.schema import OperatorCall, OpSchema, TensorType, operator_label
from dagexec.core.tensor import Tensor

if TYPE_CHECKING:
    from dagexec.core.workspace import Workspace

Step = Callable[[], object]


def nothing_to_do() -> None:
    """The step of an operator whose outputs are already right, such as a view."""


def in_sequence(steps: Sequence[Step]) -> Step:
    """One step that calls `steps` in order, those with nothing to do left out."""
    needed = [step for step in steps if step is not nothing_to_do]
    if len(needed) < 2:
        return needed[0] if needed else nothing_to_do

    def run_all() -> None:
        for step in needed:
            step()

    return run_all


class Operator(ABC):
    """An operator of a net, with its input and output blobs looked up.

    Attributes:
        definition: the OperatorDef it was made from.
        arguments: typed access to the def's arguments.
        context: its handle on the device it runs on.
        label: how messages name it.
        input_blobs, output_blobs: its blobs, in the def's order.
    """

    schema: ClassVar[OpSchema]

    def __init__(self, definition: OperatorDef, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        """Raises MissingBlobError when an input blob does not exist; output blobs are created."""
        self.definition = definition
        self.label = operator_label(definition, index, net)
        self.arguments = Arguments(definition, self.label)
        option = definition.device_option
        seed = option.random_seed if option.HasField("random_seed") else None
        self.context: Context = make_context(Device.from_option(option), seed)
        self.input_blobs = tuple(self._find(workspace, name) for name in definition.input)
        self.output_blobs = tuple(workspace.create_blob(name) for name in definition.output)

    def _find(self, workspace: Workspace, name: str) -> Blob:
        blob = workspace.get_blob_or_none(name)
        if blob is None:
            raise MissingBlobError(f"{self.label}: input blob {name!r} does not exist: feed it, or run the init net")
        return blob

    def input(self, index: int) -> Tensor:
        """Input tensor `index`. Raises MissingBlobError, naming operator and blob, when it holds nothing."""
        blob = self.input_blobs[index]
        if blob.value is None:
            raise MissingBlobError(f"{self.label}: input blob {blob.name!r} holds nothing yet")
        return blob.get(Tensor)

    def output(self, index: int) -> Tensor:
        """Output tensor `index`, made on this operator's device if the blob is empty."""
        return self.output_blobs[index].tensor(self.context)

    def x(self, index: int) -> npt.NDArray[Any]:
        """The array of input `index`."""
        tensor = self.input(index)
        if tensor.is_empty:
            raise MissingBlobError(f"{self.label}: input blob {self.input_blobs[index].name!r} holds nothing yet")
        return tensor.array

    def y(self, index: int) -> npt.NDArray[Any]:
        """The array of output `index`."""
        return self.output(index).array

    def scratch(self, shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Memory of this prepared step alone, kept between runs; its content is undefined.

        Raises ResourceError, naming the operator, when the machine cannot hold it.
        """
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        check_fits(nbytes, f"{self.label}: working memory of shape {tuple(shape)}")
        buffer = self.context.allocate(nbytes)
        return buffer.view(dtype).reshape(tuple(shape))

    def call(self) -> OperatorCall:
        """What inference sees of this operator with the tensors its input blobs hold now."""
        types = []
        for index in range(len(self.input_blobs)):
            array = self.x(index)
            types.append(TensorType(tuple(array.shape), self.input(index).meta))
        read = self.schema.values_read(self.definition)
        values = tuple(self.x(i) if i in read else None for i in range(len(types)))
        return OperatorCall(self.definition, self.arguments, tuple(types), values, self.label)

    def infer(self) -> tuple[TensorType, ...] | None:
        """Types of the outputs for the inputs as they are now; None when the schema cannot tell."""
        return None if self.schema.infer is None else tuple(self.schema.infer(self.call()))

    def bind(self, types: Sequence[TensorType] | None, *, as_view: bool = False) -> Step:
        """Size the outputs to `types` and prepare a step. With `as_view`, output 0 shares input 0's storage."""
        if types is not None:
            first = 0
            if as_view:
                self.output(0).share(self.input(0), types[0].shape)
                first = 1
            for index in range(first, len(types)):
                self.output(index).resize(types[index].shape, types[index].meta)
        return self.prepare()

    @abstractmethod
    def prepare(self) -> Step:
        """A step that computes the outputs from the inputs, both of their present sizes."""
