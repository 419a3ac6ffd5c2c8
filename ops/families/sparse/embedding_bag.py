"""EmbeddingBag: for each range of rows, or of indices of rows, what they add up to, as PyTorch's layer of that name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT32, INT64
from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import Cost, OperatorCall, TensorType
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.index.indexing import check_indices


def _infer(call: OperatorCall) -> list[TensorType]:
    """A row for each end. Raises ShapeError."""
    data = call.inputs[0]
    call.require_types(0, FLOAT32)
    if len(data.shape) < 1:
        raise call.fail("the data must have at least 1 axis")
    for index in range(1, len(call.inputs)):
        call.require_rank(index, 1)
        call.require_types(index, INT64)
    starts, ends = (call.inputs[index].shape[0] for index in (1, 2))
    if starts < ends:
        raise call.fail(f"there must be a start for each of {ends} ends, found {starts}")
    takes_mean(call)
    return [TensorType((ends, *data.shape[1:]), FLOAT32)]


def _cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    """A row is read and added for each index; what else the table has does not count."""
    data = call.inputs[0]
    rows = call.inputs[-1].elements if len(call.inputs) > 3 else data.shape[0]
    elements = rows * (data.elements // max(1, data.shape[0]))
    beside = sum(kind.nbytes for kind in call.inputs[1:])
    return Cost(elements, elements * data.meta.itemsize + beside, outputs[0].nbytes)


def takes_mean(call: OperatorCall) -> bool:
    """True where rows are averaged. Raises ShapeError for a reduction that there is not."""
    reduction = call.arguments.string("reduction", "sum")
    if reduction not in ("sum", "mean"):
        raise call.fail(f"reduction must be sum or mean, found {reduction!r}")
    return reduction == "mean"


def _bounds(starts: Array, ends: Array, count: int) -> tuple[Array, Array]:
    """Where ranges of `count` places begin and end, bounds counted and cut as Slice of ONNX does; ends never before."""
    low, high = (np.clip(np.where(one < 0, one + count, one), 0, count) for one in (starts[: len(ends)], ends))
    return low, np.maximum(low, high)


@new_operator(
    "EmbeddingBag",
    inputs=(3, 4),
    infer=_infer,
    doc="Y[i] is the sum, or the mean, of rows starts[i] to ends[i] of the data, the last not included; with indices, "
    "of the rows that those of them pick. Bounds count and are cut as those of a slice: negative ones from the end. "
    "Nothing adds up to 0, and its mean is 0. Rows are added in their order. (dagexec's own, for PyTorch's layer.)",
    input_names=("data", "starts", "ends", "indices"),
    output_names=("Y",),
    args={
        "reduction": "sum (default) or mean",
        "wrap_indices": "1: negative indices count from the end, 0: they are errors (default)",
    },
    cost=_cost,
)
class EmbeddingBag(Operator):
    """Sums by NumPy, range by range."""

    def prepare(self) -> Step:
        """A loop over the ranges."""
        data, starts, ends, *rest = (self.x(index) for index in range(len(self.input_blobs)))
        y, is_mean, count = self.y(0), takes_mean(self.call()), len(rest[0] if rest else data)

        def add() -> None:
            if rest:
                self.check(rest[0])
            for place, (start, end) in enumerate(zip(*_bounds(starts, ends, count), strict=True)):
                rows = data[rest[0][start:end]] if rest else data[start:end]
                y[place] = np.add.reduce(rows, axis=0)
                if is_mean and end > start:
                    y[place] /= np.float32(end - start)

        return add

    def check(self, indices: Array) -> None:
        """Raise IndexError, naming the operator, for an index out of range."""
        rows = self.input(0).shape[0]
        check_indices(indices, -rows if self.wraps else 0, rows, self.label)

    @property
    def wraps(self) -> bool:
        """Negative indices count from the end."""
        return self.arguments.bool("wrap_indices")


no_gradient("EmbeddingBag")
