"""OneHotAxis: indices as vectors of one value, with another one where the index says."""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.dtypes import BOOL, NUMBER_TYPES
from dagexec.core.gradient import no_gradient
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.core.traits import Rows
from dagexec.ops.families.shape.reshaping import copy_cost


def _depth(call: OperatorCall) -> int:
    """The size of the new axis, the value of input 1. Raises ShapeError unless it is one number of at least 0."""
    call.require_types(1, *NUMBER_TYPES)
    if call.inputs[1].elements != 1:
        raise call.fail("the depth must be one number")
    depth = call.known_value(1).reshape(-1)[0]
    if not 0 <= depth < 1 << 62:
        raise call.fail(f"the depth must be at least 0, found {depth}")
    return int(depth)


def infer_one_hot_axis(call: OperatorCall) -> list[TensorType]:
    """The axes of the indices and a new one at `axis`, of the type of the two values."""
    indices = call.inputs[0].shape
    call.require_types(0, *NUMBER_TYPES)
    call.require_types(2, *NUMBER_TYPES, BOOL)
    call.require_shape(2, (2,), "the value elsewhere, and the one where the index says")
    axis = call.axis("axis", -1, len(indices) + 1)
    return [TensorType((*indices[:axis], _depth(call), *indices[axis:]), call.inputs[2].meta)]


def _rows(asked: RowsCall) -> list[Rows | None]:
    """Those of the indices; the new axis may be before them."""
    rows = asked.only(0)
    axis = asked.call.axis("axis", -1, asked.rank(0) + 1)
    return [rows.at(rows.axis + (axis <= rows.axis))]


@new_operator(
    "OneHotAxis",
    infer=infer_one_hot_axis,
    doc="A new axis, of the size in input 1, with values[1] where the index says and values[0] elsewhere. Negative "
    "indices count from the end; an index out of range stands nowhere. Fractions of indices are cut off. "
    "(dagexec's own, for ONNX's OneHot.)",
    input_names=("indices", "depth", "values"),
    output_names=("Y",),
    args={"axis": "where the new axis is in the output; negative counts from the end (default -1)"},
    cost=copy_cost,
    value_inputs=(1,),
    onnx=(OnnxName("OneHot", 28, {"axis": "axis"}),),
    rows=_rows,
)
class OneHotAxis(Operator):
    """Indices as vectors that differ in one place."""

    def prepare(self) -> Step:
        """Fill the output, then write one place of each vector: for an index out of range, what is there anyway."""
        indices, values, y = self.x(0), self.x(2), self.y(0)
        axis = self.call().axis("axis", -1, y.ndim)
        depth = y.shape[axis]
        if not y.size:
            return partial(y.fill, values[0])
        inner = int(np.prod(y.shape[axis + 1 :], dtype=np.int64))
        vectors = np.arange(indices.size, dtype=np.int64)
        first = vectors // inner * (depth * inner) + vectors % inner
        flat, given = y.reshape(-1), indices.reshape(-1)
        number, outside, other = (self.scratch(given.shape, kind) for kind in (np.int64, np.bool_, np.bool_))
        chosen = self.scratch(given.shape, y.dtype)

        def encode() -> None:
            with np.errstate(invalid="ignore"):
                np.copyto(number, given, casting="unsafe")
            np.less(number, 0, out=outside)
            np.add(number, depth, out=number, where=outside)
            np.less(number, 0, out=outside)
            np.greater_equal(number, depth, out=other)
            np.logical_or(outside, other, out=outside)
            np.copyto(number, 0, where=outside)
            np.multiply(number, inner, out=number)
            np.add(number, first, out=number)
            np.copyto(chosen, values[1:])
            np.copyto(chosen, values[:1], where=outside)
            np.copyto(y, values[0])
            np.put(flat, number, chosen, mode="clip")

        return encode


no_gradient("OneHotAxis")
