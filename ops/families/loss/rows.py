"""Losses that give a number a row of tensors of one shape, and their gradients: the rows cut into pieces for the cache.

A class says which passes compute a piece; 16-bit floats are widened to float32 before and narrowed behind them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import declares
from dagexec.core.rows import along_axis
from dagexec.core.schema import Cost, OperatorCall, OpSchema, TensorType, memory_cost
from dagexec.ops.base.blocks import BLOCK, Array, Scratch, compute_dtype, convert, is_narrow, row_pieces

Shape = tuple[int, ...]
RowShape = Callable[[Shape], Shape]
"""The shape of one number a row, for tensors of a shape."""


def first_axis(shape: Shape) -> Shape:
    """A row is all that has one index of the first axis."""
    return shape[:1]


def all_but_last(shape: Shape) -> Shape:
    """A row is along the last axis."""
    return shape[:-1]


def require_rows(call: OperatorCall, tensors: Sequence[int]) -> Shape:
    """The shape that the inputs `tensors` share, with an axis or more. Raises ShapeError."""
    call.require_types(tensors[0], *FLOAT_TYPES)
    call.require_same_type(*tensors)
    shape = call.inputs[tensors[0]].shape
    name = call.definition.input[tensors[0]]
    if not shape:
        raise call.fail(f"input {name!r} must have at least 1 axis, found a scalar")
    for index in tensors[1:]:
        call.require_shape(index, shape, f"the shape of {name!r}")
    return shape


class _Rows(Operator):
    """What losses of rows and their gradients share."""

    @staticmethod
    def rows(shape: Shape) -> Shape:
        """The shape of the result, for tensors of a shape."""
        return first_axis(shape)

    def sizes(self, index: int) -> tuple[int, int]:
        """Rows of the tensor at input `index`, and the elements of each."""
        shape = self.x(index).shape
        outer = math.prod(self.rows(shape))
        return outer, math.prod(shape[len(self.rows(shape)) :])

    def pieces(self, index: int) -> list[slice]:
        """Ranges of rows whose elements fit a piece."""
        rows, members = self.sizes(index)
        return row_pieces(rows, max(1, BLOCK // max(1, members)))

    def scratches(self, index: int) -> tuple[Scratch, Scratch]:
        """Scratch memory for the largest piece: for the passes, and for what is widened."""
        rows, members = self.sizes(index)
        largest = min(rows, max(1, BLOCK // max(1, members))) * max(1, members)
        work = compute_dtype(self.x(index).dtype)
        return Scratch(self, largest, work), Scratch(self, largest, work)


class RowLoss(_Rows):
    """One number a row, from inputs of one shape."""

    def prepare(self) -> Step:
        rows, members = self.sizes(0)
        tensors = [self.x(index).reshape(rows, members) for index in range(len(self.input_blobs))]
        z = self.y(0).reshape(rows)
        work = compute_dtype(tensors[0].dtype)
        scratch, wide = self.scratches(0)
        result = self.scratch((rows,), work) if is_narrow(z.dtype) else z
        steps: list[Step] = []
        for piece in self.pieces(0):
            sources = [tensor[piece] for tensor in tensors]
            if is_narrow(z.dtype):
                copies = [wide(number, source.shape) for number, source in enumerate(sources)]
                steps += [convert(source, copy) for source, copy in zip(sources, copies, strict=True)]
                sources = copies
            steps += self.passes(sources, result[piece], scratch)
        if result is not z:
            steps.append(convert(result, z))
        return in_sequence(steps)

    @abstractmethod
    def passes(self, sources: Sequence[Array], z: Array, scratch: Scratch) -> list[Step]:
        """The NumPy calls for a piece: `sources` (rows x members), the result `z` (rows)."""


class RowGradient(_Rows):
    """The gradients of some inputs of a RowLoss.

    Attributes:
        gradient: which input is dZ; the others are those of the loss, in order.
    """

    gradient: ClassVar[int] = 2

    def prepare(self) -> Step:
        given = [index for index in range(len(self.input_blobs)) if index != self.gradient]
        rows, members = self.sizes(given[0])
        tensors = [self.x(index).reshape(rows, members) for index in given]
        results = [self.y(index).reshape(rows, members) for index in range(len(self.output_blobs))]
        narrow, work = is_narrow(tensors[0].dtype), compute_dtype(tensors[0].dtype)
        dz = self.x(self.gradient).reshape(rows)
        scratch, wide = self.scratches(given[0])
        steps: list[Step] = []
        if narrow:
            widened = self.scratch((rows,), work)
            steps.append(convert(dz, widened))
            dz = widened
        for piece in self.pieces(given[0]):
            sources, targets = [tensor[piece] for tensor in tensors], [result[piece] for result in results]
            if not narrow:
                steps += self.passes(sources, dz[piece][:, None], targets, scratch)
                continue
            copies = [wide(number, source.shape) for number, source in enumerate(sources)]
            outs = [wide(len(copies) + number, target.shape) for number, target in enumerate(targets)]
            steps += [convert(source, copy) for source, copy in zip(sources, copies, strict=True)]
            steps += self.passes(copies, dz[piece][:, None], outs, scratch)
            steps += [convert(out, target) for out, target in zip(outs, targets, strict=True)]
        return in_sequence(steps)

    @abstractmethod
    def passes(self, sources: Sequence[Array], dz: Array, targets: Sequence[Array], scratch: Scratch) -> list[Step]:
        """The NumPy calls for a piece: `sources` and `targets` (rows x members), `dz` (rows x 1)."""


@declares
def row_loss_operator(
    name: str,
    inputs: Sequence[str],
    doc: str,
    *,
    rows: RowShape = first_axis,
    args: Mapping[str, str] | None = None,
    check: Callable[[OperatorCall], object] | None = None,
) -> OpSchema:
    """The schema of a RowLoss; `check` raises ArgumentError for invalid arguments."""

    def infer(call: OperatorCall) -> list[TensorType]:
        shape = require_rows(call, range(len(inputs)))
        if check is not None:
            check(call)
        return [TensorType(rows(shape), call.inputs[0].meta)]

    return OpSchema(
        name,
        infer=infer,
        doc=doc,
        input_names=tuple(inputs),
        output_names=("Z",),
        args=args or {},
        cost=_row_cost,
        rows=along_axis(0, *range(len(inputs))),
    )


@declares
def row_gradient_operator(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    rows: RowShape = first_axis,
    gradient: int = 2,
    args: Mapping[str, str] | None = None,
    check: Callable[[OperatorCall], object] | None = None,
) -> OpSchema:
    """The schema of a RowGradient."""
    tensors = [index for index in range(len(inputs)) if index != gradient]

    def infer(call: OperatorCall) -> list[TensorType]:
        shape = require_rows(call, tensors)
        call.require_same_type()
        call.require_shape(gradient, rows(shape), "one element a row")
        if check is not None:
            check(call)
        return [call.inputs[tensors[0]]] * len(call.definition.output)

    return OpSchema(
        name,
        infer=infer,
        doc=f"The gradient of {name.removesuffix('Gradient')}.",
        input_names=tuple(inputs),
        output_names=tuple(outputs),
        args=args or {},
        cost=_row_cost,
        rows=along_axis(0, *range(len(inputs))),
    )


def _row_cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    elements = max(kind.elements for kind in call.inputs)
    cost = memory_cost(call, outputs)
    return Cost(4 * elements, cost.bytes_read, cost.bytes_written)


def gradient_after_inputs(op_type: str, inputs: Sequence[int]) -> None:
    """Register the maker `<op_type>Gradient(inputs of the loss, dZ)`, which gives the gradients of `inputs`."""

    @gradient_of(op_type)
    def maker(request: GradientRequest) -> GradientOperators:
        given = [*request.definition.input, request.dy(0)]
        return request.single(f"{op_type}Gradient", given, inputs)


def inner_product(one: Array, other: Array, out: Array) -> Step:
    """The step `out[i] = sum of one[i] * other[i]`."""
    return partial(np.vecdot, one, other, out=out)
