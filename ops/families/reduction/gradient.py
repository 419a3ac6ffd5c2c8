"""Gradients of the reductions: what each element contributed to the sum, mean, product, extreme or norm it went into.

The gradient of an extreme goes to every element that equals it, as Caffe2's; that of a norm is 0 where it has none.
16-bit floats are computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.expressions import (
    ELEMENT,
    ROW_COUNT,
    Expression,
    element,
    equal,
    inputs_of,
    number,
    select,
    sign,
    with_inputs,
)
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of, no_gradient
from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
from dagexec.core.registry import declares
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import OperatorCall, OpSchema, TensorType
from dagexec.core.traits import Rows
from dagexec.ops.base.blocks import BLOCK, Array, Scratch, compute_dtype, convert
from dagexec.ops.base.broadcast_reduction import reduced
from dagexec.ops.base.expression_steps import expression_steps
from dagexec.ops.families.reduction.axes import (
    COUNT_ARGS,
    EXTREME_ARGS,
    REDUCED_ARGS,
    UNREAD_COUNT,
    Axes,
    AxesReader,
    back_axes,
    check_lengths,
    front_axes,
    has_lengths,
    one_axis_of_three,
    output_shape,
    places_along,
    reduced_axes,
    require_lengths,
    tail_axes,
)

NAMES = ("X", "Y", "dY")

Form = Callable[[Expression, Expression, Expression], Expression]
"""From X, Y and dY to dX."""

Described = tuple[Form | None, str]
"""A form, and the same in words."""


def _of_input(call: OperatorCall, names: Sequence[str]) -> OperatorCall:
    """The call as the reduction of X has it."""
    return replace(call, inputs=(call.inputs[names.index("X")],))


class ReductionGradient(Operator):
    """Base of the gradients of reductions.

    Attributes:
        axes: which axes of X the reduction is over.
        names: which of X, Y and dY the inputs are.
        form: the gradient; None for one that no expression says.
    """

    axes: ClassVar[AxesReader]
    names: ClassVar[tuple[str, ...]]
    form: ClassVar[Form | None]

    def expression(self) -> Expression:
        """The gradient from the element of X, which is 0, and from Y and dY, 1 and 2, of one value a row."""
        form = type(self).form
        assert form is not None
        return form(element(0), element(1, of_row=True), element(2, of_row=True))

    def operands(self) -> tuple[dict[str, Array], Axes]:
        """The inputs but for lengths, Y and dY with the reduced axes of size 1; and these axes."""
        axes, _ = type(self).axes(_of_input(self.call(), self.names))
        kept = output_shape(self.y(0).shape, axes, True)
        arrays = {name: self.x(index) for index, name in enumerate(self.names)}
        return {name: array if name == "X" else array.reshape(kept) for name, array in arrays.items()}, axes

    def prepare(self) -> Step:
        """Piece by piece; in float32 where dX has 16 bits."""
        dx, (arrays, axes), expression = self.y(0), self.operands(), self.expression()
        count = math.prod(dx.shape[axis] for axis in axes)
        if len(self.input_blobs) > len(self.names):
            return self._of_prefixes(expression, arrays, axes[0])
        return self._step(with_inputs(expression, {ROW_COUNT: number(count)}), arrays)

    def _step(self, expression: Expression, arrays: dict[str, Array]) -> Step:
        """The expression of `arrays`, by the names of what it reads."""
        positions, dx = inputs_of(expression), self.y(0)
        rows = Scratch(self, min(dx.size, BLOCK), compute_dtype(dx.dtype))

        def passes(pieces: Sequence[Array], out: Array, scratch: Scratch) -> list[Step]:
            return expression_steps([expression], dict(zip(positions, pieces, strict=True)), [out], scratch, rows)

        given = [arrays[(*NAMES, "count")[position]] for position in positions]
        return reduced(self, dx.shape, given, dx, None if expression.kind == ELEMENT else passes)

    def _of_prefixes(self, expression: Expression, arrays: dict[str, Array], axis: int) -> Step:
        """The gradient as of all elements, with the lengths as what a mean is over, and 0 behind them."""
        dx = self.y(0)
        lengths = self.x(len(self.names)).reshape(output_shape(dx.shape, (axis,), True))
        counts, behind = self.scratch(lengths.shape, compute_dtype(dx.dtype)), self.scratch(dx.shape, np.bool_)
        return in_sequence(
            [
                partial(check_lengths, lengths, dx.shape[axis], self.label),
                partial(np.maximum, lengths, 1, out=counts, casting="unsafe"),
                self._step(with_inputs(expression, {ROW_COUNT: element(3, of_row=True)}), {**arrays, "count": counts}),
                partial(np.greater_equal, places_along(axis, dx.shape), lengths, out=behind),
                partial(np.copyto, dx, 0, where=behind),
            ]
        )


class ProductGradient(ReductionGradient):
    """The product is the one of all elements before, times the one of all behind, which is right for zeros, too."""

    def prepare(self) -> Step:
        """Running products of rows, forwards and backwards; the reduced axes are moved to the end and folded."""
        dx, (arrays, axes) = self.y(0), self.operands()
        if not dx.size:
            return nothing_to_do
        last, work = tuple(range(dx.ndim - len(axes), dx.ndim)), compute_dtype(dx.dtype)
        count = math.prod(dx.shape[axis] for axis in axes)
        x, dy, result = (np.moveaxis(one, axes, last) for one in (arrays["X"], arrays["dY"], dx))
        rows, before, behind = (self.scratch((dx.size // count, count), work) for _ in range(3))
        backwards = behind[:, ::-1]
        return in_sequence(
            [
                convert(x, rows.reshape(x.shape)),
                partial(before.fill, 1),
                partial(behind.fill, 1),
                partial(np.multiply.accumulate, rows[:, :-1], axis=1, out=before[:, 1:]),
                partial(np.multiply.accumulate, rows[:, :0:-1], axis=1, out=backwards[:, 1:]),
                partial(np.multiply, before, behind, out=before),
                partial(np.multiply, before.reshape(x.shape), dy, out=result, casting="unsafe"),
            ]
        )


@declares
def _operator(name: str, axes: AxesReader, args: dict[str, str], names: tuple[str, ...], doc: str) -> OpSchema:
    prefixes = args is COUNT_ARGS

    def infer(call: OperatorCall) -> list[TensorType]:
        kind = call.inputs[names.index("X")]
        call.require_types(names.index("X"), *FLOAT_TYPES)
        call.require_same_type(*range(len(names)))
        reduced, keep = axes(_of_input(call, names))
        shape = output_shape(kind.shape, reduced, keep)
        for index, one in enumerate(names):
            if one != "X":
                call.require_shape(index, shape, f"{one}: what the reduction of X gives")
        if prefixes and has_lengths(replace(call, inputs=(kind, *call.inputs[len(names) :])), 1):
            require_lengths(call, len(names), shape)
        return [kind]

    def rows(asked: RowsCall) -> list[Rows | None]:
        own = asked.rows[names.index("X")]
        if own is None:
            raise asked.without_rows()
        gone, keep = axes(_of_input(asked.call, names))
        if own.axis in gone:
            raise asked.mixes(own.axis)
        left = own if keep else own.at(own.axis - sum(axis < own.axis for axis in gone))
        for index, one in enumerate(asked.rows):
            if one is not None and one != (own if names[index : index + 1] == ("X",) else left):
                raise asked.refuse(f"input {index} has rows {one}, expected {left}")
        return [own]

    return OpSchema(
        name,
        inputs=(len(names), len(names) + prefixes),
        infer=infer,
        doc=f"Gradient of {name.removesuffix('Gradient')}, whose arguments it takes: {doc}",
        input_names=(*names, "lengths") if prefixes else names,
        output_names=("dX",),
        args=args,
        unread_args=UNREAD_COUNT if prefixes else (),
        rows=rows,
    )


def _define(
    of: str, form: Form | None, axes: AxesReader, args: dict[str, str], names: tuple[str, ...], doc: str
) -> None:
    """Register the gradient of reduction `of` with the inputs `names`, and its maker."""
    name = f"{of}Gradient"
    base = ProductGradient if form is None else ReductionGradient
    members = {"axes": staticmethod(axes), "names": names, "form": form and staticmethod(form)}
    _operator(name, axes, args, names, doc)(type(name, (base,), {**members, "__doc__": doc, "__module__": __name__}))

    @gradient_of(of)
    def maker(request: GradientRequest) -> GradientOperators:
        blobs = {"X": request.x(0), "Y": request.y(0), "dY": request.dy(0)}
        lengths = request.definition.input[1:]
        return request.single(name, [*(blobs[one] for one in names), *lengths], [0])


_WHOLE = ("dY", "X", "Y")
_SHAPED = ("dY", "X")
_SUM: Described = lambda x, y, dy: dy, "dX = dY."
_MEAN: Described = lambda x, y, dy: dy / ROW_COUNT, "dX = dY / the number of elements."
_EXTREME: Described = lambda x, y, dy: select(equal(x, y), dy, 0), "dX = dY where X equals Y, else 0."
_BY_NAME: dict[str, Described] = {
    "Sum": _SUM,
    "Mean": _MEAN,
    "Max": _EXTREME,
    "Min": _EXTREME,
    "Prod": (None, "dX = dY times the product of the other elements."),
    "L1": (lambda x, y, dy: sign(x) * dy, "dX = dY sign(X); 0 where X is 0."),
    "L2": (lambda x, y, dy: x / select(equal(y, 0), math.inf, y) * dy, "dX = dY X / Y; 0 where Y is 0."),
}
for _name, (_form, _doc) in _BY_NAME.items():
    _args = EXTREME_ARGS if _form is _EXTREME[0] else REDUCED_ARGS
    _define(f"Reduce{_name}", _form, reduced_axes, _args, _WHOLE, _doc)
for _side, _axes in (("Front", front_axes), ("Back", back_axes)):
    _define(f"Reduce{_side}Sum", _SUM[0], _axes, COUNT_ARGS, _SHAPED, _SUM[1])
    _define(f"Reduce{_side}Mean", _MEAN[0], _axes, COUNT_ARGS, _SHAPED, _MEAN[1])
    _define(f"Reduce{_side}Max", _EXTREME[0], _axes, COUNT_ARGS, _WHOLE, _EXTREME[1])
_define("ReduceTailSum", _SUM[0], tail_axes, {}, _SHAPED, _SUM[1])
_define("RowwiseMax", _EXTREME[0], one_axis_of_three(2), {}, NAMES, _EXTREME[1])
_define("ColwiseMax", _EXTREME[0], one_axis_of_three(1), {}, NAMES, _EXTREME[1])
no_gradient("ArgMax", "ArgMin")
