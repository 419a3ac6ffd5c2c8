"""Gradients of Sum, Mean, Max and Min, operators of any number of inputs, which are called X1, X2 and so on."""

from __future__ import annotations

from typing import ClassVar

from dagexec.core.expressions import element, equal, select
from dagexec.core.gradient import Gradient, GradientOperators, GradientRequest, gradient_of
from dagexec.core.schema import UNBOUNDED, OperatorCall
from dagexec.ops.base.broadcasting import broadcast_shape
from dagexec.ops.base.gradient_selection import one_operator
from dagexec.ops.base.operand_gradients import Form, OperandGradients, Views, register_gradients, stretched_views


class VariadicGradient(OperandGradients):
    """Base of the gradients of operators of any number of inputs, called X1, X2 and so on.

    Attributes:
        before: what the inputs before X1 are called.
    """

    given = "dY"
    before: ClassVar[tuple[str, ...]]

    @classmethod
    def roles(cls, call: OperatorCall) -> dict[str, int]:
        """Those before, then the operands."""
        names = (*cls.before, *cls.operands(call))
        return {name: index for index, name in enumerate(names) if index < len(call.inputs)}

    @classmethod
    def operands(cls, call: OperatorCall) -> tuple[str, ...]:
        """X1, X2 and so on."""
        return operand_names(len(call.inputs) - len(cls.before))

    @classmethod
    def views(cls, call: OperatorCall) -> Views:
        roles = cls.roles(call)
        operands = {name: call.inputs[roles[name]].shape for name in cls.operands(call)}
        shape = broadcast_shape(call, list(operands.values()))
        return {**stretched_views(operands, shape), **dict.fromkeys(cls.before, shape)}


def operand_names(count: int) -> tuple[str, ...]:
    """X1, X2 and so on."""
    return tuple(f"X{number}" for number in range(1, count + 1))


class ExtremeGradient(VariadicGradient):
    """Gradients of Max and Min."""

    before = ("Y", "dY")

    @classmethod
    def views(cls, call: OperatorCall) -> Views:
        """By NumPy's rule, Y's checked too."""
        views = super().views(call)
        call.require_shape(0, views["Y"], "what the operands broadcast to")
        return views

    def form(self, name: str) -> Form:
        """dY where the operand is the result."""
        return (name, "Y", "dY"), select(equal(element(0), element(1)), element(2), 0)


def _define_extreme(forward: str) -> None:
    members = {"__doc__": f"Gradients of {forward}.", "__module__": __name__}
    cls = type(f"{forward}Gradient", (ExtremeGradient,), members)
    names = (("Y", "dY", "X1", "X2", "..."), ("dX1", "dX2", "..."))
    doc = "dXi = dY where Xi = Y, else 0, summed where Xi was stretched. Of equal operands each gets all of dY."
    register_gradients(cls, f"{forward}Gradient", (3, UNBOUNDED), (1, UNBOUNDED), names, doc, {}, 1)


_define_extreme("Max")
_define_extreme("Min")


@gradient_of("Max", "Min")
def extreme_maker(request: GradientRequest) -> GradientOperators:
    """All operands are read, so one that was overwritten is missing."""
    count = len(request.definition.input)
    inputs = [request.y(0), request.dy(0), *(request.x(index) for index in range(count))]
    return one_operator(request, f"{request.definition.type}Gradient", inputs, operand_names(count))


class MeanGradient(VariadicGradient):
    """Gradients of Mean."""

    before = ("dY",)

    @classmethod
    def operands(cls, call: OperatorCall) -> tuple[str, ...]:
        """As many as there are inputs for their shapes, or outputs."""
        return operand_names(len(call.inputs) - 1 or len(call.definition.output))

    @classmethod
    def views(cls, call: OperatorCall) -> Views:
        """By NumPy's rule; operands that are not given have the shape of dY."""
        if len(call.inputs) > 1:
            return super().views(call)
        return dict.fromkeys(("dY", *cls.operands(call)), call.inputs[0].shape)

    def form(self, name: str) -> Form:
        count = len(self.operands(self.call()))
        return ("dY",), element(0) / count


register_gradients(
    MeanGradient,
    "MeanGradient",
    (1, UNBOUNDED),
    (1, UNBOUNDED),
    (("dY", "X1", "X2", "..."), ("dX1", "dX2", "...")),
    "dXi = dY / n, summed where Xi was stretched. The operands are read for their shapes alone; without them the "
    "gradients have the shape of dY, and n is the number of outputs.",
    {},
    0,
)


@gradient_of("Mean")
def mean_maker(request: GradientRequest) -> GradientOperators:
    """The operands give the shapes."""
    count = len(request.definition.input)
    inputs = [request.dy(0), *(request.shape_of_x(index) for index in range(count))]
    return one_operator(request, "MeanGradient", inputs, operand_names(count))


@gradient_of("Sum")
def pass_through_maker(request: GradientRequest) -> GradientOperators:
    """dY is the gradient of each operand, without any operator; with broadcast=1 it is summed to the operand's shape.

    Without broadcast=1 the operands must have one shape, as in Caffe2: a gradient of another shape than its blob is an
    error of the first operator that reads it.
    """
    if not request.arguments.bool("broadcast"):
        given = request.outputs[0]
        return request.result([], {index: given for index in request.wanted if given is not None})
    made = [
        request.plain_operator("SumReduceLike", [request.dy(0), request.shape_of_x(index)], [request.dx(index)])
        for index in sorted(request.wanted)
    ]
    gradients: dict[int, Gradient] = {index: request.dx(index) for index in request.wanted}
    return request.result(made, gradients)
