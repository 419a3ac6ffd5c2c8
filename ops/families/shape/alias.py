"""Operators that pass a tensor on as it is: other names for a blob, and marks of where and how a value is wanted.

In dagexec a net decides which blobs share memory, so `Alias` says that Y is X, never that writing one changes the
other: where either is written, Y is a copy.
"""

from __future__ import annotations

from dagexec.core.gradient import GradientOperators, GradientRequest, fill_like, gradient_by, gradient_of, no_gradient
from dagexec.core.operator import Operator, Step, nothing_to_do
from dagexec.core.registry import new_operator
from dagexec.core.schema import UNBOUNDED, OperatorCall, TensorType, one_to_one, same_as_input
from dagexec.errors import SchemaError
from dagexec.ops.families.shape.reshaping import Copy, View, copy_cost, no_cost, view_operator


@view_operator("Alias", same_as_input, "Y is X under another name.")
class Alias(View):
    """Another name."""


@view_operator(
    "AliasWithName",
    same_as_input,
    "Y is X under another name.",
    {"name": "a label for readers of the net; not read", "is_backward": "1: it is a gradient; not read"},
)
class AliasWithName(View):
    """Another name, with a label."""


@view_operator("EnsureDense", same_as_input, "Y is X; the gradient of X is dense, whatever that of Y is.")
class EnsureDense(View):
    """The identity, whose gradient is dense."""


@view_operator("NegateGradient", same_as_input, "Y is X; the gradient of X is that of Y with the other sign.")
class NegateGradient(View):
    """The identity, against which what is before it learns."""


for _forward in ("Alias", "AliasWithName", "EnsureDense"):
    gradient_by(_forward, "Alias", ("dY",))
gradient_by("NegateGradient", "Negative", ("dY",))


def infer_copy_on_device_like(call: OperatorCall) -> list[TensorType]:
    """Y has the type of X; of the second input only the device counts."""
    return [call.inputs[0]]


@new_operator(
    "CopyOnDeviceLike",
    infer=infer_copy_on_device_like,
    doc="A copy of X on the operator's device, where the second input is, too; that is not read.",
    input_names=("X", "like"),
    output_names=("Y",),
    cost=copy_cost,
)
class CopyOnDeviceLike(Copy):
    """A copy to where another tensor is."""


# dX is a copy of dY where X is.
gradient_by("CopyOnDeviceLike", "CopyOnDeviceLike", ("dY", "X"))


def infer_free(call: OperatorCall) -> list[TensorType]:
    """What the inputs are. Raises SchemaError unless each output is the input of the same number."""
    inputs, outputs = list(call.definition.input), list(call.definition.output)
    if inputs != outputs:
        raise SchemaError(f"{call.label}: the outputs must be the inputs, in order; expected {inputs}, found {outputs}")
    return list(call.inputs)


@new_operator(
    "Free",
    inputs=(1, UNBOUNDED),
    outputs=(1, UNBOUNDED),
    infer=infer_free,
    doc=(
        "Says that nobody reads these blobs any more; its outputs are its inputs. A net plans its memory before "
        "it runs and knows that already, so nothing happens: the blobs keep what they hold."
    ),
    input_names=("X1", "X2", "..."),
    output_names=("X1", "X2", "..."),
    inplace=one_to_one,
    cost=no_cost,
)
class Free(Operator):
    """The end of some blobs."""

    reads_strided = writes_strided = True

    def prepare(self) -> Step:
        return nothing_to_do


@new_operator(
    "ZeroGradient",
    infer=lambda _call: [],
    doc="Computes nothing; the backward pass gives X a gradient of zeros here.",
    input_names=("X",),
    cost=no_cost,
    effects=True,
)
class ZeroGradient(Operator):
    """A use of a blob that does not depend on its value."""

    reads_strided = True

    def prepare(self) -> Step:
        return nothing_to_do


@gradient_of("ZeroGradient")
def zero_gradient(request: GradientRequest) -> GradientOperators:
    """Zeros, in the shape and type of X."""
    fill = fill_like(request.x(0), request.dx(0), 0.0)
    if request.definition.HasField("device_option"):
        fill.device_option.CopyFrom(request.definition.device_option)
    return request.result([fill], {0: request.dx(0)})


no_gradient("Free")
