"""Hardmax: 1 at the largest element of each group, 0 elsewhere."""

from __future__ import annotations

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Operator, Step, nothing_to_do
from dagexec.core.registry import new_operator
from dagexec.core.rows import apart_from
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.families.activation.softmax import SOFTMAX_ARGS, grouping, normalized_axes


def infer_hardmax(call: OperatorCall) -> list[TensorType]:
    """The type of X, which must be a float type."""
    call.require_types(0, *FLOAT_TYPES)
    grouping(call)
    return [call.inputs[0]]


@new_operator(
    "Hardmax",
    infer=infer_hardmax,
    doc="Y = 1 at the largest element of each group, of several equal ones the first, and 0 elsewhere. A group is "
    "the axes from `axis` on, or with single_axis `axis` alone. (dagexec's own, for ONNX.)",
    input_names=("X",),
    output_names=("Y",),
    args=SOFTMAX_ARGS,
    rows=apart_from(lambda call: normalized_axes(call, len(call.inputs[0].shape))),
)
class Hardmax(Operator):
    """The largest of each group."""

    def prepare(self) -> Step:
        """Zeros, a search, and a 1 where it found something."""
        shape = outer, group, inner = grouping(self.call())
        x, y = self.x(0).reshape(shape), self.y(0).reshape(-1)
        if not y.size:
            return nothing_to_do
        first = np.arange(outer)[:, np.newaxis] * (group * inner) + np.arange(inner)
        places = self.scratch(first.shape, np.int64)

        def mark() -> None:
            np.argmax(x, axis=1, out=places)
            np.multiply(places, inner, out=places)
            np.add(places, first, out=places)
            y.fill(0)
            np.put(y, places, 1, mode="clip")

        return mark


no_gradient("Hardmax")
