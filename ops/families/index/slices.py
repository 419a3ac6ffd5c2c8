"""GatherND and ScatterND: slices picked from, or put to, places that vectors of indices name."""

from __future__ import annotations

import numpy as np

from dagexec.core.dtypes import INT32, INT64
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import new_operator
from dagexec.core.rows import own_places
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import OperatorCall, TensorType, first_to_first
from dagexec.core.traits import Rows
from dagexec.ops.families.index.elements import gathered_gradient, scattered_gradient
from dagexec.ops.families.index.places import picking, place_memory, row_numbers
from dagexec.ops.families.index.scattering import REDUCTION_HELP, Scattering, reduction_of
from dagexec.ops.families.shape.reshaping import copy_cost

BATCH_HELP = "so many leading axes of DATA and INDICES are one, and indices count within their places (default 0)"


def _picked_shape(call: OperatorCall) -> tuple[int, ...]:
    """The shape of the slices that INDICES name in DATA. Raises ShapeError where they do not fit together."""
    data, indices = call.inputs[0].shape, call.inputs[1].shape
    call.require_types(1, INT32, INT64)
    batch = call.arguments.int("batch_dims", 0)
    if not 0 <= batch < min(len(data), len(indices)) or data[:batch] != indices[:batch]:
        raise call.fail(f"the first batch_dims={batch} axes of DATA and of INDICES must be equal, and one more follow")
    count = indices[-1]
    if not 1 <= count <= len(data) - batch:
        raise call.fail(f"the last axis of INDICES must have 1 to {len(data) - batch} elements, found {count}")
    return (*indices[:-1], *data[batch + count :])


def infer_gather_nd(call: OperatorCall) -> list[TensorType]:
    """A slice of DATA for each vector of indices."""
    return [TensorType(_picked_shape(call), call.inputs[0].meta)]


def _picked_rows(asked: RowsCall) -> list[Rows | None]:
    """On one of the leading axes that DATA and INDICES share, or on an axis of vectors of indices into shared DATA.

    Or INDICES have the numbers of the rows, and each row names its own.
    """
    batch, own = asked.call.arguments.int("batch_dims", 0), asked.rows[0]
    if own is not None and 1 in asked.counted and not batch and own.axis < asked.call.inputs[1].shape[-1]:
        indices = asked.known_contents(1)
        shared = [np.delete(one, own.axis, -1) for one in indices]
        return [own_places(asked, own, [one[..., own.axis] for one in indices], shared)]
    rows = asked.only(0, 1)
    if asked.rows[0] is None:
        inside = batch <= rows.axis < asked.rank(1) - 1
    else:
        inside = rows.axis < batch and asked.rows[1] is not None
    if not inside:
        raise asked.mixes(rows.axis)
    return [rows]


@new_operator(
    "GatherND",
    infer=infer_gather_nd,
    doc="Y[i, j] = DATA[INDICES[i, j, 0], INDICES[i, j, 1], ...]: a slice of DATA for each vector of indices. "
    "Negative ones count from the end. (dagexec's own, for ONNX.)",
    input_names=("DATA", "INDICES"),
    output_names=("Y",),
    args={"batch_dims": BATCH_HELP},
    cost=copy_cost,
    onnx=(OnnxName("GatherND", 13, {"batch_dims": "batch_dims"}),),
    rows=_picked_rows,
)
class GatherND(Operator):
    """Slices picked by vectors of indices."""

    def prepare(self) -> Step:
        """Vectors of indices to numbers of slices, and what lies there."""
        data, indices, y = self.x(0), self.x(1), self.y(0)
        rows = place_memory(self, 1, indices.shape[:-1])
        steps = row_numbers(self, data.shape, indices, self.arguments.int("batch_dims", 0), rows)
        if not y.size:
            return in_sequence(steps)
        count = y.size // rows.size
        return picking(self, steps, data.reshape(-1, count), rows, y.reshape(*rows.shape, count))


def infer_scatter_nd(call: OperatorCall) -> list[TensorType]:
    """The type of DATA; the updates have a slice for each vector of indices."""
    call.require_same_type(0, 2)
    call.require_shape(2, _picked_shape(call), "a slice of DATA for each vector of indices")
    reduction_of(call)
    return [call.inputs[0]]


@new_operator(
    "ScatterND",
    infer=infer_scatter_nd,
    doc="Y = DATA, with UPDATES[i, j] at Y[INDICES[i, j, 0], INDICES[i, j, 1], ...]. Negative indices count from "
    "the end. Slices are taken in order: of several for a place the last one stays, unless a reduction joins them. "
    "(dagexec's own, for ONNX.)",
    input_names=("DATA", "INDICES", "UPDATES"),
    output_names=("Y",),
    args={"batch_dims": BATCH_HELP, "reduction": REDUCTION_HELP},
    inplace=first_to_first,
    cost=copy_cost,
    onnx=(OnnxName("ScatterND", 18, {"reduction": "reduction"}),),
)
class ScatterND(Scattering):
    """Slices put where vectors of indices say."""

    def prepare(self) -> Step:
        """Numbers of slices, which are written as rows, or as elements if they are that."""
        data, indices, updates = self.x(0), self.x(1), self.x(2)
        rows = place_memory(self, 1, indices.shape[:-1])
        steps = row_numbers(self, data.shape, indices, self.arguments.int("batch_dims", 0), rows)
        count = updates.size // max(1, rows.size)
        return self.scattered(steps, rows, updates if count <= 1 else updates.reshape(*rows.shape, count))


@gradient_of("GatherND")
def gather_nd_gradient(request: GradientRequest) -> GradientOperators:
    """A sum of dY at the places that were picked."""
    return gathered_gradient(request, "ScatterND")


@gradient_of("ScatterND")
def scatter_nd_gradient(request: GradientRequest) -> GradientOperators:
    """See `scattered_gradient`."""
    return scattered_gradient(request, "ScatterND", "GatherND")
