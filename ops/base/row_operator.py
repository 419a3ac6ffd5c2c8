"""Row operators: what a function of an element and its row computes, along one axis or several, for all engines.

    @row_operator("SquaredSoftmax", gradient=("X", "dY"))
    def squared_softmax(x: Expression) -> Expression:
        '''Y = X^2 / the sum of X^2.'''
        return square(x) / row_sum(square(x))

A row is what shares its indices along the other axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.expressions import inputs_of
from dagexec.core.gradient import gradient_by
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import operator
from dagexec.core.rows import apart_from, summing
from dagexec.core.schema import Cost, OperatorCall, OpSchema, TensorType, memory_cost
from dagexec.ops.base.blocks import BLOCK, Scratch, block_indices, compute_dtype, convert, is_narrow
from dagexec.ops.base.expressed import (
    DY,
    Check,
    Definition,
    Expressed,
    Function,
    GradientDefinition,
    flops_by_default,
)
from dagexec.ops.base.expression_steps import expression_steps

Members = Callable[[OperatorCall], range]
"""The axes that the members of a row are along, which are neighbors. Raises ShapeError for a bad argument."""

AXIS_ARGS = {"axis": "the axis of the rows (default -1)"}


def last_by_default(call: OperatorCall) -> range:
    """Argument `axis`, by default the last one."""
    axis = call.axis("axis", -1, len(call.inputs[0].shape))
    return range(axis, axis + 1)


class RowOperator(Expressed):
    """Base: all inputs and the output have one shape.

    Attributes:
        members: the axes of a row.
    """

    members: ClassVar[Members]

    def view(self) -> tuple[int, int, int]:
        """The shape as rows: outer x members x inner."""
        shape, axes = self.x(0).shape, type(self).members(self.call())
        return math.prod(shape[: axes.start]), math.prod(shape[axes.start : axes.stop]), math.prod(shape[axes.stop :])

    def prepare(self) -> Step:
        """Piece by piece of whole rows; in float32 where elements have 16 bits."""
        view, expression = self.view(), self.expression()
        sources = {position: self.x(position).reshape(view) for position in inputs_of(expression)}
        result = self.y(0).reshape(view)
        if result.size == 0:
            return in_sequence([])
        outer, members, inner = view
        count, work = min(outer, max(1, BLOCK // (members * inner))), compute_dtype(result.dtype)
        scratch, wide = (Scratch(self, count * members * inner, work) for _ in range(2))
        rows = Scratch(self, count * inner, work, is_own=True)
        steps: list[Step] = []
        for (piece,) in block_indices((outer,), count):
            parts, target = {position: source[piece] for position, source in sources.items()}, result[piece]
            if is_narrow(result.dtype):
                for number, (position, part) in enumerate(list(parts.items())):
                    parts[position] = wide(number, part.shape)
                    steps.append(convert(part, parts[position]))
                target = wide(len(parts), target.shape)
            steps += expression_steps([expression], parts, [target], scratch, rows)
            if target.dtype != result.dtype:
                steps.append(convert(target, result[piece]))
        return in_sequence(steps)


def row_operator(
    name: str,
    args: Mapping[str, str] = AXIS_ARGS,
    *,
    members: Members = last_by_default,
    gradient: tuple[str, ...] = (),
    slope: Function | None = None,
    check: Check | None = None,
    onnx: OnnxName | None = None,
    **traits: Any,
) -> Callable[[Function], Function]:
    """Decorator: register a function of an element and its row as operator `name`, for all engines.

    `args` is the help text of each argument, those that `members` reads included; the rest is as of
    `elementwise_operator`, but that `slope` is dX from the first of X and Y that is read, and dY.
    """

    def register(function: Function) -> Function:
        forward = Definition(function)
        names = ("X",) if forward.arity == 1 else tuple(f"X{position}" for position in range(forward.arity))
        fields = {"formula": None, "onnx": () if onnx is None else (onnx,), **traits}
        _register(name, forward, names, "Y", args, members, check, doc=forward.doc, **fields)
        if gradient:
            derived = GradientDefinition(forward, gradient, slope, of_rows=True)
            doc = f"dX, the gradient of {name}, from {' and '.join(gradient)}."
            _register(f"{name}Gradient", derived, gradient, "dX", args, members, check, doc=doc)
            gradient_by(name, f"{name}Gradient", gradient)
        return function

    return register


def _register(
    name: str,
    definition: Definition | GradientDefinition,
    inputs: tuple[str, ...],
    output: str,
    args: Mapping[str, str],
    members: Members,
    check: Check | None,
    **fields: Any,
) -> None:
    forward = definition if isinstance(definition, Definition) else definition.forward
    flops = flops_by_default(definition)
    replaceable = inputs.index(DY) if DY in inputs else 0

    def infer(call: OperatorCall) -> list[TensorType]:
        call.require_types(0, *FLOAT_TYPES)
        call.require_same_type()
        for position in range(1, len(inputs)):
            call.require_shape(position, call.inputs[0].shape, f"that of {inputs[0]}")
        members(call)
        forward.read(call.arguments)
        if check is not None:
            check(call)
        return [call.inputs[0]]

    def cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
        return memory_cost(call, outputs, flops)

    schema = OpSchema(
        name,
        infer=infer,
        input_names=inputs,
        output_names=(output,),
        args=args,
        cost=cost,
        rows=summing(apart_from(members, *range(len(inputs))), members),
        **{"inplace": lambda source, target: source == replaceable and target == 0, **fields},
    )
    namespace = {
        "formula": definition,
        "members": staticmethod(members),
        "__doc__": fields["doc"],
        "__module__": forward.function.__module__,
    }
    operator(schema)(type(name, (RowOperator,), namespace))
