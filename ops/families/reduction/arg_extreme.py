"""ArgMax and ArgMin: where along an axis the extreme elements are."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np

from dagexec.core.dtypes import INT64, NUMBER_TYPES
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import declares
from dagexec.core.rows import reduced
from dagexec.core.schema import OperatorCall, OpSchema, TensorType
from dagexec.ops.families.reduction.axes import Axes, output_shape, reduction_cost


def infer_arg_extreme(call: OperatorCall) -> list[TensorType]:
    """The output has X's shape, with `axis` gone or of size 1, of int64."""
    call.require_types(0, *NUMBER_TYPES)
    shape = call.inputs[0].shape
    axis = call.axis("axis", -1, len(shape))
    call.arguments.bool("last")
    output = TensorType(output_shape(shape, (axis,), call.arguments.bool("keepdims", True)), INT64)
    if output.elements and shape[axis] == 0:
        raise call.fail("an axis without elements has no maximum or minimum")
    return [output]


def _searched_axis(call: OperatorCall) -> tuple[Axes, bool]:
    """The axis that is searched, and whether it stays."""
    return (call.axis("axis", -1, len(call.inputs[0].shape)),), call.arguments.bool("keepdims", True)


@declares
def _arg_operator(name: str, what: str) -> OpSchema:
    return OpSchema(
        name,
        infer=infer_arg_extreme,
        doc=f"Index of the {what} element along `axis`, int64; of several equal ones the first, with `last` the last, "
        "and NaN before all.",
        input_names=("X",),
        output_names=("Indices",),
        args={
            "axis": "axis to search, negative ones counted from the end (default -1)",
            "keepdims": "1: the axis stays, with size 1 (default 1)",
            "last": "1: of several equal ones the last (default 0)",
        },
        cost=reduction_cost,
        onnx=(OnnxName(name, 13, {"axis": "axis", "keepdims": "keepdims", "select_last_index": "last"}),),
        rows=reduced(_searched_axis),
    )


class _ArgExtreme(Operator):
    """Base of ArgMax and ArgMin.

    Attributes:
        search: the ndarray method.
    """

    search: ClassVar[Callable[..., Any]]

    def prepare(self) -> Step:
        """A search along the last axis, of a copy when the axis is another one: NumPy would make one each run."""
        x, call = self.x(0), self.call()
        axis = call.axis("axis", -1, x.ndim)
        y = self.y(0).reshape(output_shape(x.shape, (axis,), False))
        if y.size == 0:
            return in_sequence([])
        last = self.arguments.bool("last")
        if math.prod(x.shape[axis + 1 :]) == 1 and not last:
            return partial(type(self).search, x, axis=axis, out=y)
        moved = np.moveaxis(x, axis, -1)
        copy = self.scratch(moved.shape, x.dtype)
        ordered = moved[..., ::-1] if last else moved
        steps: list[Step] = [partial(np.copyto, copy, ordered), partial(type(self).search, copy, axis=-1, out=y)]
        return in_sequence([*steps, partial(np.subtract, x.shape[axis] - 1, y, out=y)] if last else steps)


@_arg_operator("ArgMax", "largest")
class ArgMax(_ArgExtreme):
    """Index of the maximum."""

    search = np.ndarray.argmax


@_arg_operator("ArgMin", "smallest")
class ArgMin(_ArgExtreme):
    """Index of the minimum."""

    search = np.ndarray.argmin
