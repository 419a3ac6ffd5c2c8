"""Gradients of the binary operators, Pow and Where; names and order of inputs are Caffe2's.

The gradient of an operand that was stretched is summed over the axes along which it was (`broadcast_reduction`).
Comparisons and logic pass on none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from dagexec.core.dtypes import BOOL, FLOAT_TYPES, NUMBER_TYPES
from dagexec.core.expressions import Expression, apply, element, equal, log, power, select
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of, no_gradient, not_differentiable
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import OperatorCall, TensorType, first_to_first, memory_cost
from dagexec.ops.base.broadcast_reduction import reduced
from dagexec.ops.base.broadcasting import BROADCAST_ARGS, broadcast_shape, forward_call, operand_views, reduced_view
from dagexec.ops.base.gradient_selection import one_operator
from dagexec.ops.base.operand_gradients import Form, OperandGradients, Views, register_gradients, stretched_views
from dagexec.ops.families.elementwise.arithmetic import infer_pow, where_condition_view

no_gradient("EQ", "NE", "LT", "LE", "GT", "GE", "And", "Or", "Xor")


class BinaryGradient(OperandGradients):
    """Base of the gradients of the binary operators.

    Attributes:
        forms: by operand, how its gradient is computed.
        inputs: by their number, what the inputs are called.
    """

    given = "dC"
    forms: ClassVar[Mapping[str, Form]]
    inputs: ClassVar[Mapping[int, tuple[str, ...]]] = {3: ("dC", "A", "B")}

    @classmethod
    def roles(cls, call: OperatorCall) -> dict[str, int]:
        """By the number of inputs. Raises ShapeError for another number."""
        names = cls.inputs.get(len(call.inputs))
        if names is None:
            numbers = " or ".join(map(str, cls.inputs))
            raise call.fail(f"expected {numbers} inputs, found {len(call.inputs)}")
        return {name: index for index, name in enumerate(names)}

    @classmethod
    def operands(cls, call: OperatorCall) -> tuple[str, ...]:
        return "A", "B"

    @classmethod
    def views(cls, call: OperatorCall) -> Views:
        """Those of the forward operator; an A that is not given has the shape of C."""
        roles = cls.roles(call)
        forward = forward_call(call, (roles.get("A", roles["dC"]), roles["B"]))
        shape, view = operand_views(forward)
        a = forward.inputs[0].shape
        if "C" in roles:
            call.require_shape(roles["C"], shape, "what A and B broadcast to")
        return {"dC": shape, "C": shape, **stretched_views({"A": a, "B": view}, shape)}

    def form(self, name: str) -> Form:
        return type(self).forms[name]


_0, _1, _2 = map(element, range(3))


def _define(
    forward: str,
    doc: str,
    forms: Mapping[str, Form],
    inputs: Mapping[int, tuple[str, ...]] | None = None,
) -> None:
    """Register the gradient of binary operator `forward`."""
    accepted = inputs or BinaryGradient.inputs
    members = {"forms": forms, "inputs": accepted, "__doc__": f"Gradients of {forward}.", "__module__": __name__}
    counts = (min(accepted), max(accepted))
    names = (accepted[counts[1]], ("dA", "dB"))
    cls = type(f"{forward}Gradient", (BinaryGradient,), members)
    register_gradients(cls, f"{forward}Gradient", counts, (1, 2), names, doc, BROADCAST_ARGS, 0)


_define("Add", "dA = dC and dB = dC, summed where stretched.", {"A": (("dC",), _0), "B": (("dC",), _0)})
_define("Sub", "dA = dC and dB = -dC, summed where stretched.", {"A": (("dC",), _0), "B": (("dC",), -_0)})
_define(
    "Mul",
    "dA = dC * B and dB = dC * A, summed where stretched.",
    {"A": (("dC", "B"), _0 * _1), "B": (("dC", "A"), _0 * _1)},
)
_define(
    "Div",
    "dA = dC / B and dB = -dC * C / B, summed where stretched. A is read for its shape alone; with three inputs, dC, B "
    "and C, it is that of C.",
    {"A": (("dC", "B"), _0 / _1), "B": (("dC", "C", "B"), -(_0 * _1 / _2))},
    {3: ("dC", "B", "C"), 4: ("dC", "A", "B", "C")},
)


@gradient_of("Add", "Sub")
def sum_maker(request: GradientRequest) -> GradientOperators:
    """A and B are read for their shapes alone."""
    inputs = [request.dy(0), request.shape_of_x(0), request.shape_of_x(1)]
    return one_operator(request, f"{request.definition.type}Gradient", inputs, ("A", "B"))


@gradient_of("Mul")
def product_maker(request: GradientRequest) -> GradientOperators:
    """Each operand is read for the gradient of the other one."""
    a = request.x(0) if 1 in request.wanted else request.shape_of_x(0)
    b = request.x(1) if 0 in request.wanted else request.shape_of_x(1)
    return one_operator(request, "MulGradient", [request.dy(0), a, b], ("A", "B"))


@gradient_of("Div")
def quotient_maker(request: GradientRequest) -> GradientOperators:
    """The operands and the output; an A that the output overwrites is left out."""
    if request.shape_of_x(0) == request.y(0):
        inputs = [request.dy(0), request.x(1), request.y(0)]
    else:
        inputs = [request.dy(0), request.x(0), request.x(1), request.y(0)]
    return one_operator(request, "DivGradient", inputs, ("A", "B"))


class PowGradient(BinaryGradient):
    """Gradients of Pow by the base, A, and the exponent, B."""

    untyped = ("B",)
    inputs = {2: ("dC", "A"), 4: ("dC", "A", "B", "C")}

    @classmethod
    def operands(cls, call: OperatorCall) -> tuple[str, ...]:
        """The exponent only where it is an input."""
        return ("A", "B") if len(call.inputs) == 4 else ("A",)

    @classmethod
    def views(cls, call: OperatorCall) -> Views:
        """Those of the forward operator."""
        roles = cls.roles(call)
        infer_pow(forward_call(call, [roles[name] for name in ("A", "B") if name in roles]))
        if "B" in roles:
            return super().views(call)
        return {"dC": call.inputs[roles["A"]].shape, "A": call.inputs[roles["A"]].shape}

    def form(self, name: str) -> Form:
        """dC * e * A^(e - 1), 0 for e = 0; dC * C * ln(A), 0 where A = 0 unless C is infinite there."""
        if len(self.input_blobs) == 2:
            return ("dC", "A"), _by_base(self.arguments.float("exponent", 1.0))
        if name == "A":
            return ("dC", "A", "B"), _0 * select(equal(_2, 0), 0, apply("power", _1, _2 - 1) * _2)
        counts = ~equal(_1, 0) | equal(_2, math.inf)
        return ("dC", "A", "C"), _0 * select(counts, _2 * log(_1), 0)


def _by_base(exponent: float) -> Expression:
    if exponent == 0:
        return _0 * 0
    if exponent == 1:
        return _0
    return _0 * ((_1 if exponent == 2 else power(_1, exponent - 1)) * exponent)


register_gradients(
    PowGradient,
    "PowGradient",
    (2, 4),
    (1, 2),
    (("dY", "X", "exponent", "Y"), ("dX", "dexponent")),
    "dX = dY * exponent * X^(exponent - 1) and dexponent = dY * Y * ln(X), 0 for X = 0, summed where stretched. The "
    "exponent is an argument, or an input with Y beside it. (Caffe2 composes it of other operators.)",
    {"exponent": "the exponent, when there is no input for it", **BROADCAST_ARGS},
    0,
    40,
)


@gradient_of("Pow")
def power_maker(request: GradientRequest) -> GradientOperators:
    """Base and exponent are both read."""
    if not request.has_x(1):
        return one_operator(request, "PowGradient", [request.dy(0), request.x(0)], ("A",))
    inputs = [request.dy(0), request.x(0), request.x(1), request.y(0)]
    return one_operator(request, "PowGradient", inputs, ("A", "B"))


def infer_sum_reduce_like(call: OperatorCall) -> list[TensorType]:
    """The output has the shape of B, which must broadcast to that of A."""
    meta = call.require_types(0, *FLOAT_TYPES)
    call.require_types(1, *NUMBER_TYPES, BOOL)
    reduced_view(call)
    output = TensorType(call.inputs[1].shape, meta)
    if call.definition.output[0] == call.definition.input[0] and output != call.inputs[0]:
        raise call.fail(f"the output {output} cannot overwrite A, which is {call.inputs[0]}")
    return [output]


@new_operator(
    "SumReduceLike",
    infer=infer_sum_reduce_like,
    doc="C = the sum of A over the axes along which B is stretched to A's shape, as in NumPy or, with broadcast=1 "
    "or an axis, by Caffe2's older rule; C has the shape of B.",
    input_names=("A", "B"),
    output_names=("C",),
    args=BROADCAST_ARGS,
    inplace=first_to_first,
    cost=lambda call, _outputs: memory_cost(call, [call.inputs[0]]),
)
class SumReduceLike(Operator):
    """Sum to the shape of another tensor."""

    def prepare(self) -> Step:
        a, view = self.x(0), reduced_view(self.call())
        return reduced(self, a.shape, [a], self.y(0).reshape(stretched_views({"B": view}, a.shape)["B"]))


not_differentiable("it computes the gradient of a stretched operand", "SumReduceLike")


class WhereGradient(OperandGradients):
    """Gradients of Where."""

    given = "dZ"
    untyped = ("C",)

    @classmethod
    def roles(cls, call: OperatorCall) -> dict[str, int]:
        """The inputs of Where, then the gradient."""
        return {"C": 0, "X": 1, "Y": 2, "dZ": 3}

    @classmethod
    def operands(cls, call: OperatorCall) -> tuple[str, ...]:
        return "X", "Y"

    @classmethod
    def views(cls, call: OperatorCall) -> Views:
        """Those of the forward operator."""
        call.require_types(0, BOOL)
        x, y = call.inputs[1].shape, call.inputs[2].shape
        shapes = {"C": where_condition_view(forward_call(call, (0, 1, 2))), "X": x, "Y": y}
        shape = broadcast_shape(call, list(shapes.values()))
        return {**stretched_views(shapes, shape), "dZ": shape}

    def form(self, name: str) -> Form:
        """dZ where the operand was taken."""
        return ("dZ", "C"), select(_1, _0, 0) if name == "X" else select(_1, 0, _0)


register_gradients(
    WhereGradient,
    "WhereGradient",
    (4, 4),
    (1, 2),
    (("C", "X", "Y", "dZ"), ("dX", "dY")),
    "dX = dZ where C is true, else 0; dY = dZ where C is false, else 0; summed where stretched. X and Y are read for "
    "their shapes alone.",
    {"broadcast_on_rows": "1: C has an element for each row of X (default 0)"},
    3,
)


@gradient_of("Where")
def where_maker(request: GradientRequest) -> GradientOperators:
    """The condition passes on none."""
    names = ("X", "Y")
    indices = [index for index in (1, 2) if index in request.wanted]
    if not indices:
        return request.result([], {})
    inputs = [request.x(0), request.x(1), request.x(2), request.dy(0)]
    if len(indices) == 2:
        return request.single("WhereGradient", inputs, indices)
    return request.single("WhereGradient", inputs, indices, wanted=[names[index - 1] for index in indices])
