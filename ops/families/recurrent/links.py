"""Operators that Caffe2 puts into the step nets of a RecurrentNetwork: rows of a sequence, and their gradients.

dagexec's own RecurrentNetwork has no need of them (`dagexec.core.recurrent_networks`); they are for nets of steps that
are run one by one.
"""

from __future__ import annotations

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES, INT32
from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import UNBOUNDED, OperatorCall, TensorType
from dagexec.errors import ShapeError
from dagexec.ops.base.blocks import Array

LINK, ACCUMULATE = "rnn_internal_apply_link", "rnn_internal_accumulate_gradient_input"
_OFFSET = "how many rows behind that of the step"


def _timestep(call: OperatorCall) -> None:
    call.require_types(0, INT32)
    if call.inputs[0].elements != 1:
        call.require_shape(0, (1,), "the number of the step")
    if call.arguments.int("offset", -1) < 0:
        raise call.fail("argument 'offset' must be given, and not negative")


def _infer_link(call: OperatorCall) -> list[TensorType]:
    _timestep(call)
    window = call.arguments.int("window", -1)
    external = call.inputs[1]
    if window < 1 or not external.shape:
        raise call.fail(f"expected a sequence, and at least one row of it, found {external} and window {window}")
    return [TensorType((window, *external.shape[1:]), external.meta), external]


def _infer_sum(call: OperatorCall) -> list[TensorType]:
    _timestep(call)
    call.require_types(1, *FLOAT_TYPES)
    call.require_same_type(1, 2)
    call.require_shape(1, (call.inputs[1].shape[0], *call.inputs[2].shape[1:]), "rows as the sum has them")
    return [call.inputs[2]]


class _OfRows(Operator):
    """Base of operators on rows from that of a step on."""

    def rows(self, array: Array, first: int, count: int) -> Array:
        """So many rows of an array. Raises ShapeError where there are fewer."""
        if not 0 <= first <= array.shape[0] - count:
            raise ShapeError(f"{self.label}: rows {first} to {first + count - 1} are not there; there are {len(array)}")
        return array[first : first + count]


@new_operator(
    LINK,
    infer=_infer_link,
    doc="`window` rows of a sequence from the number of the step plus `offset` on, as a copy; Caffe2 gives the rows "
    "themselves, to be written as well.",
    inputs=(2, 2),
    outputs=(2, 2),
    enforced_inplace=((1, 1),),
    input_names=("timestep", "external"),
    output_names=("internal", "external"),
    args={"offset": _OFFSET, "window": "how many rows"},
    required_args=("offset", "window"),
)
class ApplyLink(_OfRows):
    """Copy the rows of this step."""

    def prepare(self) -> Step:
        """Look at the number of the step in each run."""
        timestep, external, internal = self.x(0).reshape(-1), self.x(1), self.y(0)
        offset = self.arguments.int("offset", 0)

        def copy() -> None:
            np.copyto(internal, self.rows(external, int(timestep[0]) + offset, len(internal)))

        return copy


@new_operator(
    ACCUMULATE,
    infer=_infer_sum,
    doc="Adds a row of a sequence, that of the step, to the row of another that is `offset` behind it, in place.",
    inputs=(3, 3),
    outputs=(1, UNBOUNDED),
    enforced_inplace=((2, 0),),
    input_names=("timestep", "gradient", "sum"),
    output_names=("sum",),
    args={"offset": _OFFSET},
    required_args=("offset",),
)
class AccumulateInputGradient(_OfRows):
    """Add the row of this step."""

    def prepare(self) -> Step:
        """Look at the number of the step in each run."""
        timestep, gradient, total = self.x(0).reshape(-1), self.x(1), self.y(0)
        offset = self.arguments.int("offset", 0)

        def add() -> None:
            step = int(timestep[0])
            target = self.rows(total, step + offset, 1)
            np.add(target, self.rows(gradient, step, 1), target)

        return add


no_gradient(LINK, ACCUMULATE)
