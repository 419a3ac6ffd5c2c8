"""Row operators: what a function of elements and their row computes, along one axis or several, for all engines.

    @row_operator("SquaredSoftmax", gradient=("X", "dY"))
    def squared_softmax(x: Expression) -> Expression:
        '''Y = X^2 / the sum of X^2.'''
        return square(x) / row_sum(square(x))

A row is what shares its indices along the other axes. A function that joins the members, such as `row_sum(x * y)`, has
one value a row: the shape of its result lacks the axes of the members.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from dagexec.core.dtypes import FLOAT32, FLOAT_TYPES
from dagexec.core.expressions import ROW_COUNT, Expression, inputs_of, number, with_inputs
from dagexec.core.gradient import gradient_by
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import operator
from dagexec.core.rows import apart_from, before_axis, summing
from dagexec.core.schema import Cost, OperatorCall, OpSchema, TensorType, memory_cost
from dagexec.ops.base.blocks import BLOCK, Array, Scratch, block_indices, compute_dtype, convert, is_narrow
from dagexec.ops.base.expressed import (
    DY,
    Check,
    Definition,
    Expressed,
    Function,
    GradientDefinition,
    Slope,
    expression_of,
    flops_by_default,
)
from dagexec.ops.base.expression_steps import expression_steps
from dagexec.platform.cached import cached_property
from dagexec.platform.records import dataclass

Members = Callable[[OperatorCall, int], range]
"""The axes that the members of a row are along, which are neighbors, of tensors of so many axes.

Raises ShapeError for a bad argument.
"""

Shape = tuple[int, ...]

AXIS_ARGS = {"axis": "the axis of the rows (default -1)"}


def last_by_default(call: OperatorCall, rank: int) -> range:
    """Argument `axis`, by default the last one."""
    axis = call.axis("axis", -1, rank)
    return range(axis, axis + 1)


def all_axes(_call: OperatorCall, rank: int) -> range:
    """All elements are one row."""
    return range(rank)


def all_but_first(call: OperatorCall, rank: int) -> range:
    """A row is all that has one index of the first axis."""
    if not rank:
        raise call.fail("the inputs must have at least 1 axis, found a scalar")
    return range(1, rank)


def last_axis(call: OperatorCall, rank: int) -> range:
    """A row is along the last axis."""
    if not rank:
        raise call.fail("the inputs must have at least 1 axis, found a scalar")
    return range(rank - 1, rank)


@dataclass(frozen=True)
class Form:
    """Which inputs and outputs of a row operator have the shape of its elements, and which one value a row.

    Attributes:
        definition: what it computes.
        members: the axes of a row.
        of_all: the shape of one value where no axes are left.
    """

    definition: Definition | GradientDefinition
    members: Members
    of_all: Shape = ()

    @cached_property
    def of_row(self) -> list[bool]:
        """Of each input whether it has one value a row."""
        definition = self.definition
        if isinstance(definition, Definition):
            return [False] * definition.arity
        return [self.joins and name in ("Y", DY) for name in definition.reads]

    @cached_property
    def joins(self) -> bool:
        """The function, or that which this is the gradient of, has one value a row."""
        definition = self.definition
        forward = definition if isinstance(definition, Definition) else definition.forward
        return forward.result(forward.defaults, FLOAT32).is_of_row

    @property
    def element(self) -> int:
        """The first input of the shape of the elements."""
        return self.of_row.index(False)

    def axes(self, call: OperatorCall) -> range:
        """The axes of a row."""
        return self.members(call, len(call.inputs[self.element].shape))

    def row_shape(self, call: OperatorCall) -> Shape:
        """That of one value a row."""
        axes, shape = self.axes(call), call.inputs[self.element].shape
        return shape[: axes.start] + shape[axes.stop :] or self.of_all

    def infer(self, call: OperatorCall) -> list[TensorType]:
        """The types of the outputs. Raises ShapeError for inputs that do not fit."""
        first = call.inputs[self.element]
        call.require_types(self.element, *FLOAT_TYPES)
        call.require_same_type()
        for position, of_row in enumerate(self.of_row):
            if not of_row:
                call.require_shape(position, first.shape, f"that of {call.definition.input[self.element]!r}")
        row_shape = self.row_shape(call)
        for position, of_row in enumerate(self.of_row):
            is_one = row_shape == self.of_all and call.inputs[position].elements == 1
            if of_row and not is_one:
                call.require_shape(position, row_shape, "one element a row")
        if isinstance(self.definition, GradientDefinition):
            return [first] * len(self.definition.of_inputs)
        return [TensorType(row_shape, first.meta) if self.joins else first]


Piece = tuple[dict[int, Array], list[Array]]
"""Inputs by position and outputs, [rows, members, inner], or with 1 in place of what there is one of for all."""


class OfRows(Expressed):
    """Base: expressions of elements and of their rows."""

    @abstractmethod
    def expressions(self) -> tuple[Expression, ...]:
        """The results from elements of the inputs, with the operator's arguments as numbers."""

    @abstractmethod
    def elements(self) -> tuple[Shape, int]:
        """The shape of the elements, and the axis that the members of a row are along."""

    @abstractmethod
    def operands(self) -> Piece:
        """Views of the inputs that are read and of the outputs, which broadcast to that shape."""

    def row_steps(self, pieces: Sequence[Piece]) -> Step:
        """The calls piece by piece; in float32 where elements have 16 bits."""
        largest = [0, 0]
        for sources, results in pieces:
            rows, members, inner = np.broadcast_shapes(*(one.shape for one in (*sources.values(), *results)))
            counts = rows * max(1, members) * inner, rows * inner
            largest = list(map(max, largest, counts))
        meta, (shape, axis) = self.y(0).dtype, self.elements()
        expressions = [with_inputs(one, {ROW_COUNT: number(max(1, shape[axis]))}) for one in self.expressions()]
        scratch, wide = (Scratch(self, largest[0], compute_dtype(meta)) for _ in range(2))
        of_row, steps = Scratch(self, largest[1], compute_dtype(meta), is_own=True), list[Step]()
        for sources, targets in pieces:
            parts, outs = dict(sources), targets
            if is_narrow(meta):
                for place, (position, part) in enumerate(sources.items()):
                    parts[position] = wide(place, part.shape)
                    steps.append(convert(part, parts[position]))
                outs = [wide(len(parts) + place, target.shape) for place, target in enumerate(targets)]
            steps += expression_steps(expressions, parts, outs, scratch, of_row)
            steps += [convert(out, y) for out, y in zip(outs, targets, strict=True) if out.dtype != y.dtype]
        return in_sequence(steps)


class RowOperator(OfRows):
    """Base: inputs and outputs have one shape, or one value a row.

    Attributes:
        form: which of them.
    """

    form: ClassVar[Form]

    def expressions(self) -> tuple[Expression, ...]:
        """The results from elements of the inputs, with the operator's arguments as numbers."""
        definition, meta = type(self).form.definition, self.input(0).meta
        return self.arguments.once((definition, meta, "all"), lambda: definition.expressions(self.arguments, meta))

    def view(self) -> tuple[int, int, int]:
        """The shape of the elements as rows: outer x members x inner."""
        form, call = type(self).form, self.call()
        shape, axes = call.inputs[form.element].shape, form.axes(call)
        return math.prod(shape[: axes.start]), math.prod(shape[axes.start : axes.stop]), math.prod(shape[axes.stop :])

    def elements(self) -> tuple[Shape, int]:
        """As rows."""
        return self.view(), 1

    def operands(self) -> Piece:
        """Views outer x members x inner, or outer x 1 x inner, of the inputs that are read, by position, and of the
        outputs."""
        form, view = type(self).form, self.view()
        row = view[0], 1, view[2]
        sources = {
            position: self.x(position).reshape(row if form.of_row[position] else view)
            for position in inputs_of(*self.expressions())
        }
        joins = isinstance(form.definition, Definition) and form.joins
        return sources, [self.y(index).reshape(row if joins else view) for index in range(len(self.output_blobs))]

    def prepare(self) -> Step:
        """Piece by piece of whole rows."""
        (outer, members, inner), (sources, results) = self.view(), self.operands()
        if not results[0].size:
            return in_sequence([])
        count = min(outer, max(1, BLOCK // (max(1, members) * inner)))
        return self.row_steps(
            [
                ({position: source[piece] for position, source in sources.items()}, [y[piece] for y in results])
                for (piece,) in block_indices((outer,), count)
            ]
        )


def row_operator(
    name: str,
    args: Mapping[str, str] = AXIS_ARGS,
    *,
    members: Members = last_by_default,
    inputs: tuple[str, ...] = (),
    output: str = "Y",
    of_all: Shape = (),
    gradient: tuple[str, ...] = (),
    of_inputs: tuple[int, ...] = (0,),
    slope: Slope | None = None,
    check: Check | None = None,
    onnx: OnnxName | None = None,
    **traits: Any,
) -> Callable[[Function], Function]:
    """Decorator: register a function of elements and their row as operator `name`, for all engines.

    `args` is the help text of each argument, those that `members` reads included. `inputs` and `output` are names for
    the documentation (X, or X0, X1, ...; Y), `of_all` is the shape of what all elements are joined to; `gradient` names
    what operator `nameGradient` reads, in order, of X (X0, X1, ...), Y and dY, and `of_inputs` the inputs that it gives
    the gradients of. `slope` is these as an expression, or as a tuple, of what is read, dY last, where they are not to
    be derived. The rest is as of `elementwise_operator`.
    """

    def register(function: Function) -> Function:
        forward = Definition(function)
        numbered = ("X",) if forward.arity == 1 else tuple(f"X{position}" for position in range(forward.arity))
        names = inputs or numbered
        fields = {"onnx": () if onnx is None else (onnx,), **traits}
        _register(name, Form(forward, members, of_all), (names, (output,)), args, check, doc=forward.doc, **fields)
        if gradient:
            derived = GradientDefinition(forward, gradient, slope, of_rows=True, of_inputs=of_inputs)
            shown = {**dict(zip(numbered, names, strict=True)), "Y": output, DY: f"d{output}"}
            reads = tuple(shown[one] for one in gradient)
            gives = tuple(f"d{names[position]}" for position in of_inputs)
            doc = f"{' and '.join(gives)}, the gradient of {name}, from {' and '.join(reads)}."
            _register(f"{name}Gradient", Form(derived, members, of_all), (reads, gives), args, check, doc=doc)
            gradient_by(name, f"{name}Gradient", gradient, of_inputs=of_inputs)
        return function

    return register


def _register(
    name: str,
    form: Form,
    names: tuple[tuple[str, ...], tuple[str, ...]],
    args: Mapping[str, str],
    check: Check | None,
    **fields: Any,
) -> None:
    definition = form.definition
    forward = definition if isinstance(definition, Definition) else definition.forward
    flops = flops_by_default(definition)
    replaceable = 0
    if isinstance(definition, GradientDefinition):
        replaceable = form.element if form.joins else definition.reads.index(DY)
    has_place = len(names[1]) == 1 and (not form.joins or isinstance(definition, GradientDefinition))

    def infer(call: OperatorCall) -> list[TensorType]:
        found = form.infer(call)
        forward.read(call.arguments)
        if check is not None:
            check(call)
        return found

    def expression(call: OperatorCall) -> Expression | None:
        rank = len(call.inputs[0].shape)
        is_last = not form.joins and form.axes(call) == range(rank - 1, rank)
        return expression_of(forward, call.arguments, call.inputs[0].meta) if is_last else None

    def cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
        moved = memory_cost(call, outputs)
        return Cost(int(flops * call.inputs[form.element].elements), moved.bytes_read, moved.bytes_written)

    positions = range(len(form.of_row))
    schema = OpSchema(
        name,
        infer=infer,
        input_names=names[0],
        output_names=names[1],
        args=args,
        cost=cost,
        expression=expression if forward is definition else None,
        rows=before_axis(lambda call: form.axes(call).start, *positions)
        if form.joins
        else summing(apart_from(form.axes, *positions), form.axes),
        **{"inplace": lambda source, target: has_place and source == replaceable and target == 0, **fields},
    )
    namespace = {
        "formula": definition,
        "form": form,
        "__doc__": fields["doc"],
        "__module__": forward.function.__module__,
    }
    operator(schema)(type(name, (RowOperator,), namespace))
