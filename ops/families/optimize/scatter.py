"""Operators on rows, in place: ScatterWeightedSum, the step of gradient descent by sparse gradients, ScatterAssign."""

from __future__ import annotations

import numpy as np

from dagexec.core.dtypes import FLOAT32, FLOAT64, INT32, INT64
from dagexec.core.gradient import not_differentiable
from dagexec.core.operator import Array, Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import UNBOUNDED, Cost, OperatorCall, TensorType, first_to_first
from dagexec.ops.families.index.indexing import check_indices
from dagexec.ops.families.optimize.scalars import require_rate
from dagexec.ops.families.optimize.sparse import occurrences
from dagexec.ops.families.optimize.update import PIECE


def _slices_shape(call: OperatorCall, data: int, indices: int) -> tuple[int, ...]:
    """The shape of slices of input `data` at input `indices`. Raises ShapeError."""
    call.require_types(indices, INT32, INT64)
    if not call.inputs[data].shape:
        raise call.fail("the tensor must have rows, found one without axes")
    return (*call.inputs[indices].shape, *call.inputs[data].shape[1:])


def _cost(call: OperatorCall, _outputs: object) -> Cost:
    """The rows are read and written, the rest of the tensor is not."""
    rows = [kind for kind in call.inputs[1:] if kind.elements > 1]
    touched = sum(kind.nbytes for kind in rows)
    return Cost(2 * sum(kind.elements for kind in rows), 2 * touched, touched)


def infer_scatter_weighted_sum(call: OperatorCall) -> list[TensorType]:
    """The type of X_0."""
    call.require_types(0, FLOAT32, FLOAT64)
    require_rate(call, 1, "a weight")
    expected = _slices_shape(call, 0, 2)
    if len(call.inputs) % 2 == 0:
        raise call.fail("expected pairs of a tensor and its weight after the indices, found an odd number of inputs")
    for index in range(3, len(call.inputs), 2):
        call.require_same_type(0, index)
        call.require_shape(index, expected, "a row for each index")
        require_rate(call, index + 1, "a weight")
    return [call.inputs[0]]


@new_operator(
    "ScatterWeightedSum",
    inputs=(3, UNBOUNDED),
    infer=infer_scatter_weighted_sum,
    doc="For each index k, row INDICES[k] of X_0 becomes w_0 times itself, and then w_1 X_1[k], w_2 X_2[k], ... "
    "are added, in place. An index that occurs more than once is scaled and added to as often, in order. With "
    "w_0 = 1 and w_1 = -rate this is a step of gradient descent by a sparse gradient.",
    input_names=("X_0", "w_0", "INDICES", "X_1", "w_1"),
    output_names=("X_0",),
    inplace=first_to_first,
    enforced_inplace=((0, 0),),
    cost=_cost,
)
class ScatterWeightedSum(Operator):
    """Weighted sums into rows."""

    def prepare(self) -> Step:
        """For each tensor: the first occurrences of all indices, then the second ones, and so on."""
        table = self.y(0)
        height = table.shape[0]
        indices, label = self.x(2).reshape(-1), self.label
        if table.size == 0 or indices.size == 0:
            return lambda: check_indices(indices, 0, height, label)
        table = table.reshape(height, -1)
        places = range(3, len(self.input_blobs), 2)
        slices = [self.x(k).reshape(indices.size, -1) for k in places]
        sources = [self.x(k).reshape(-1) for k in (1, *(k + 1 for k in places))]
        weights = [np.zeros((), table.dtype) for _ in sources]
        length = max(1, min(indices.size, PIECE // table.shape[1]))
        rows, terms = (self.scratch((length, table.shape[1]), table.dtype) for _ in range(2))

        def scale(chosen: Array) -> None:
            kept = rows[: chosen.size]
            np.take(table, chosen, axis=0, out=kept, mode="clip")
            np.multiply(kept, weights[0], out=kept)
            table[chosen] = kept

        def add(chosen: Array, there: Array, values: Array, weight: Array) -> None:
            kept, term = rows[: chosen.size], terms[: chosen.size]
            np.take(table, chosen, axis=0, out=kept, mode="clip")
            np.take(values, there, axis=0, out=term, mode="clip")
            np.multiply(term, weight, out=term)
            np.add(kept, term, out=kept)
            table[chosen] = kept

        def scatter() -> None:
            check_indices(indices, 0, height, label)
            for weight, source in zip(weights, sources, strict=True):
                weight[...] = source[0]
            groups = [group[k : k + length] for group in occurrences(indices) for k in range(0, group.size, length)]
            if weights[0] != 1:
                for there in groups:
                    scale(indices[there])
            for values, weight in zip(slices, weights[1:], strict=True):
                for there in groups:
                    add(indices[there], there, values, weight)

        return scatter


def infer_scatter_assign(call: OperatorCall) -> list[TensorType]:
    """The type of DATA."""
    call.require_same_type(0, 2)
    call.require_shape(2, _slices_shape(call, 0, 1), "a row for each index")
    return [call.inputs[0]]


@new_operator(
    "ScatterAssign",
    infer=infer_scatter_assign,
    doc="For each index k, row INDICES[k] of DATA becomes SLICES[k], in place; the last one where an index occurs "
    "more than once.",
    input_names=("DATA", "INDICES", "SLICES"),
    output_names=("DATA",),
    inplace=first_to_first,
    enforced_inplace=((0, 0),),
    cost=_cost,
)
class ScatterAssign(Operator):
    """Rows replaced by index."""

    def prepare(self) -> Step:
        """One assignment; of equal indices the last occurrences only."""
        table, indices, label = self.y(0), self.x(1).reshape(-1), self.label
        height = table.shape[0]
        values = self.x(2).reshape(indices.size, *table.shape[1:])

        def assign() -> None:
            check_indices(indices, 0, height, label)
            for there in occurrences(indices):
                table[indices[there]] = values[there]

        return assign


not_differentiable("it changes rows in place, after the gradients are known", "ScatterWeightedSum", "ScatterAssign")
