"""Which gradients a gradient operator of several inputs gives: argument `wanted`.

Without it the outputs are the gradients of all inputs, in order, as Caffe2's. `wanted` names the outputs in order, so
that a net may ask for any of them alone; nothing is computed for the others. Operators of the convolution family have
defaults of their own (`conv.gradient_outputs`).
"""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.core.gradient import GradientOperators, GradientRequest
from dagexec.core.schema import OperatorCall
from dagexec.errors import ArgumentError

WANTED_ARGS = {"wanted": "which gradients the outputs are, in order: names of inputs (default: of all)"}


def wanted_inputs(call: OperatorCall, names: Sequence[str]) -> tuple[str, ...]:
    """What each output of the operator is the gradient of, one entry an output, out of `names`.

    Raises ArgumentError when `wanted` has a name that is none of these, or one twice, and when the number of outputs is
    another than that of the gradients.
    """
    given = "wanted" in call.arguments
    wanted = tuple(call.arguments.strings("wanted")) if given else tuple(names)
    for name in wanted:
        if name not in names:
            raise ArgumentError(f"{call.label}: argument 'wanted' must only contain {', '.join(names)}; found {name!r}")
        if wanted.count(name) > 1:
            raise ArgumentError(f"{call.label}: argument 'wanted' names {name!r} {wanted.count(name)} times")
    count = len(call.definition.output)
    if len(wanted) != count:
        hint = "" if given else " (argument 'wanted' names fewer)"
        raise ArgumentError(
            f"{call.label}: expected an output for each of the gradients of {', '.join(wanted)}, found {count}{hint}"
        )
    return wanted


def one_operator(
    request: GradientRequest, op_type: str, inputs: Sequence[str], names: Sequence[str]
) -> GradientOperators:
    """A maker's answer: operator `op_type`, which gives the gradients that are requested and no others.

    `names` are what `wanted` calls the inputs of the forward operator.
    """
    indices = [index for index in range(len(names)) if index in request.wanted]
    if len(indices) == len(names):
        return request.single(op_type, inputs, indices)
    return request.single(op_type, inputs, indices, wanted=[names[index] for index in indices])
