"""NanCheck: stops the run where a NaN or an infinity appears.

It stands behind an operator and overwrites its output in place with itself, so that whatever reads the blob comes after
the check, on any schedule: the first check that fails names an operator whose own inputs were finite.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import new_operator
from dagexec.core.schema import UNBOUNDED, OperatorCall, TensorType, first_to_first
from dagexec.errors import NonFiniteError
from dagexec.ops.base.blocks import Array

NONE: Mapping[str, Array] = {}


def infer_nan_check(call: OperatorCall) -> list[TensorType]:
    """Y has the type of X."""
    return [call.inputs[0]]


@new_operator(
    "NanCheck",
    inputs=(1, UNBOUNDED),
    infer=infer_nan_check,
    doc="Y = X; an error when X has a NaN or an infinity, that names those of the other inputs that have one, too. "
    "Tensors of other than floats pass.",
    input_names=("X", "others"),
    output_names=("Y",),
    args={"producer": "how the error names the operator that computed X (default: X itself)"},
    inplace=first_to_first,
    effects=True,
)
class NanCheck(Operator):
    """The check of one tensor."""

    def prepare(self) -> Step:
        """`isfinite` of every element; nothing but a copy for other types."""
        x, y = self.x(0), self.y(0)
        name = self.input_blobs[0].name
        producer = self.arguments.string("producer", "") or f"the run, or what fed blob {name!r}"
        steps: list[Step] = []
        if x.dtype.kind in "fV":
            finite = self.scratch(x.shape, np.bool_)
            others = {blob.name: self.x(1 + index) for index, blob in enumerate(self.input_blobs[1:])}
            steps.append(lambda: check_finite(x, finite, name, producer, self.label, others))
        if y is not x and not np.may_share_memory(x, y):
            steps.append(lambda: np.copyto(y, x))
        return in_sequence(steps)


def check_finite(
    x: Array, finite: Array, name: str, producer: str, label: str, others: Mapping[str, Array] = NONE
) -> None:
    """Raise NonFiniteError when array `x` of blob `name` has a NaN or an infinity; `finite` is memory to work in.

    The message names those of the arrays `others`, by name of their blobs, that have one, too.
    """
    np.isfinite(x, out=finite)
    if finite.all():
        return
    place = tuple(int(index) for index in np.argwhere(~finite)[0])
    count = finite.size - int(np.count_nonzero(finite))
    bad = [repr(other) for other, array in others.items() if array.dtype.kind in "fV" and not np.isfinite(array).all()]
    raise NonFiniteError(
        f"{label}: {producer} made {count} of {finite.size} elements of blob {name!r} NaN or infinite, "
        f"the first at {list(place)}: {x[place]}"
        + (f"; other blobs with such values: {', '.join(bad)}" if bad else ""),
        blob=name,
        producer=producer,
    )


@gradient_of("NanCheck")
def nan_check_gradient(request: GradientRequest) -> GradientOperators:
    """The gradient passes, and is checked as well."""
    return request.single("NanCheck", [request.dy(0)], [0], producer=f"the gradient of {request.y(0)}")
