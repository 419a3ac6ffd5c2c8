"""Einsum: sums of products of tensors, by an equation that names their axes.

Operands are joined from left to right, two at a time. What only one of them has and nobody reads later is summed first;
then a pair is a stack of matrix products, of views that are transposed and folded, or, where nothing is summed, one
product element by element. The way follows from the equation and the shapes alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from dagexec.core.dtypes import NUMBER_TYPES
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import new_operator
from dagexec.core.rows import require_side_by_side
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import UNBOUNDED, Cost, OperatorCall, TensorType
from dagexec.core.traits import Rows
from dagexec.errors import ArgumentError, GradientError
from dagexec.ops.base.blocks import Array, compute_dtype, convert
from dagexec.ops.base.row_products import row_product

Labels = tuple[str, ...]
"""What the axes of a tensor are called, in order: letters, and `...0`, `...1` for those of an ellipsis."""

_TERM = re.compile(r"[A-Za-z]*(\.\.\.)?[A-Za-z]*")


def parse(equation: str, label: str) -> tuple[list[str], str]:
    """The terms of the operands and that of the output, which follows from the others where the equation has none.

    Raises ArgumentError, naming the operator `label`.
    """
    left, arrow, output = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        counts = Counter(left.replace(",", "").replace(".", ""))
        output = "..." * ("." in left) + "".join(sorted(letter for letter, count in counts.items() if count == 1))
    letters = output.replace(".", "")
    if not all(_TERM.fullmatch(term) for term in (*terms, output)) or not set(letters) <= set(left):
        raise ArgumentError(f"{label}: argument 'equation' is not understood: {equation!r:.80}")
    if len(set(letters)) != len(letters):
        raise ArgumentError(f"{label}: the output of equation {equation!r:.80} names an axis twice")
    return terms, output


def _labels(term: str, rank: int, call: OperatorCall) -> Labels:
    """The labels of a tensor of `rank` axes, those of an ellipsis counted from its end. Raises ShapeError."""
    before, dots, after = term.partition("...")
    hidden = rank - len(before) - len(after)
    if hidden < 0 or (hidden and not dots):
        raise call.fail(f"term {term!r} of the equation does not fit a tensor of {rank} axes")
    return (*before, *(f"...{number}" for number in reversed(range(hidden))), *after)


def equation_labels(call: OperatorCall) -> tuple[list[Labels], Labels, dict[str, int]]:
    """The labels of the operands and of the output, and the size of each. Raises ShapeError where they do not agree.

    An axis of size 1 fits any size.
    """
    terms, output = parse(call.arguments.string("equation", ""), call.label)
    if len(terms) != len(call.inputs):
        raise call.fail(f"the equation has {len(terms)} terms for {len(call.inputs)} inputs")
    operands = [_labels(term, len(kind.shape), call) for term, kind in zip(terms, call.inputs, strict=True)]
    sizes: dict[str, int] = {}
    for labels, kind in zip(operands, call.inputs, strict=True):
        for name, size in zip(labels, kind.shape, strict=True):
            if sizes.setdefault(name, size) == 1:
                sizes[name] = size
            elif size not in (1, sizes[name]):
                raise call.fail(f"axis {name!r} of the equation has sizes {sizes[name]} and {size}")
    hidden = max((sum(name.startswith("...") for name in labels) for labels in operands), default=0)
    return operands, _labels(output, len(output.replace("...", "")) + hidden * ("..." in output), call), sizes


def infer_einsum(call: OperatorCall) -> list[TensorType]:
    """The sizes of the output's labels."""
    call.require_types(0, *NUMBER_TYPES)
    meta = call.require_same_type()
    _, output, sizes = equation_labels(call)
    return [TensorType(tuple(sizes[name] for name in output), meta)]


def _cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    """Of each pair, a product for each combination of its indices."""
    operands, output, sizes = equation_labels(call)
    flops, held = 0, set(operands[0])
    for number, labels in enumerate(operands[1:], 1):
        flops += 2 * prod(sizes[name] for name in held | set(labels))
        held = (held | set(labels)) & {*output, *(name for later in operands[number + 1 :] for name in later)}
    return Cost(flops, sum(kind.nbytes for kind in call.inputs), outputs[0].nbytes)


def _rows(asked: RowsCall) -> list[Rows | None]:
    """On the axes of one label, which the output has."""
    asked.require_uncounted()
    operands, output, _ = equation_labels(asked.call)
    found: dict[int, Rows] = {}
    for index, (labels, rows) in enumerate(zip(operands, asked.rows, strict=True)):
        if rows is None:
            continue
        label = labels[rows.axis]
        if label not in output or labels.count(label) > 1:
            raise asked.mixes(rows.axis)
        elsewhere = {name for place, other in enumerate(operands) if place != index for name in other}
        alone = [axis for axis, name in enumerate(labels) if name not in {*output, *elsewhere}]
        require_side_by_side(asked, index, alone)
        found[index] = rows.at(output.index(label))
    return [asked.common(found)]


@new_operator(
    "Einsum",
    inputs=(1, UNBOUNDED),
    infer=infer_einsum,
    doc="Einstein summation: the equation names the axes of the inputs and, behind ->, those of the output; Y is "
    "the product of the inputs, summed over all that the output does not name. 16-bit floats are computed in "
    "float32. (dagexec's own, for ONNX.)",
    input_names=("X1", "X2", "..."),
    output_names=("Y",),
    args={"equation": "letters, commas, an ellipsis for further axes, such as 'bij,bjk->bik'"},
    required_args=("equation",),
    cost=_cost,
    onnx=(OnnxName("Einsum", 28, {"equation": "equation"}),),
    rows=_rows,
)
class Einsum(Operator):
    """Sums of products."""

    def prepare(self) -> Step:
        """A plan of the pairs."""
        operands, output, sizes = equation_labels(self.call())
        arrays = [self.x(index) for index in range(len(operands))]
        return _Plan(self, sizes).step(arrays, operands, output, self.y(0))

    def multiply(self, a: Array, b: Array, y: Array, batch: Labels, rows: Labels, columns: Labels) -> Step:
        """The step y = a b of stacks of matrices, whose axes these labels are folded to."""
        return partial(np.matmul, a, b, out=y) if batch else row_product(self, a[0], b[0], y[0])


class _Plan:
    """The steps of one equation for given shapes."""

    def __init__(self, owner: Einsum, sizes: Mapping[str, int]) -> None:
        self._owner = owner
        self._sizes = sizes
        self._steps: list[Step] = []

    def step(self, arrays: Sequence[Array], operands: Sequence[Labels], output: Labels, y: Array) -> Step:
        """The step that writes the output to `y`."""
        work = compute_dtype(y.dtype)
        views = [self._simple(self._widened(x, work), labels) for x, labels in zip(arrays, operands, strict=True)]
        total, labels = views[0]
        for number, (view, names) in enumerate(views[1:], 1):
            later = {*output, *(name for _, others in views[number + 1 :] for name in others)}
            last = number + 1 == len(views)
            total, labels = self._joined(total, labels, view, names, later, (y, output) if last else None)
        if total is not y:
            total, labels = self._summed(total, labels, set(output))
            moved = total.transpose([labels.index(name) for name in output])
            self._steps.append(partial(np.copyto, y, moved, casting="unsafe"))
        return in_sequence(self._steps)

    def _widened(self, x: Array, work: np.dtype[Any]) -> Array:
        if x.dtype == work:
            return x
        wide = self._owner.scratch(x.shape, work)
        self._steps.append(convert(x, wide))
        return wide

    def _simple(self, x: Array, labels: Labels) -> tuple[Array, Labels]:
        """A view that has each label once, and no axis of size 1 where others are longer."""
        stretched = tuple(axis for axis, name in enumerate(labels) if x.shape[axis] != self._sizes[name])
        x, labels = x.squeeze(stretched), tuple(name for axis, name in enumerate(labels) if axis not in stretched)
        while len(set(labels)) < len(labels):
            second = next(axis for axis, name in enumerate(labels) if name in labels[:axis])
            first = labels.index(labels[second])
            rest = tuple(name for axis, name in enumerate(labels) if axis not in (first, second))
            x, labels = x.diagonal(0, first, second), (*rest, labels[second])
        return x, labels

    def _summed(self, x: Array, labels: Labels, wanted: set[str]) -> tuple[Array, Labels]:
        """The sum over all labels that nobody wants."""
        axes = tuple(axis for axis, name in enumerate(labels) if name not in wanted)
        if not axes:
            return x, labels
        kept = tuple(name for name in labels if name in wanted)
        total = self._owner.scratch([self._sizes[name] for name in kept], x.dtype)
        self._steps.append(partial(np.add.reduce, x, axis=axes, dtype=x.dtype, out=total))
        return total, kept

    def _joined(
        self, a: Array, of_a: Labels, b: Array, of_b: Labels, later: set[str], target: tuple[Array, Labels] | None
    ) -> tuple[Array, Labels]:
        """The product of two operands, summed over what they share and nobody reads later.

        It is put into `target`, an array and its labels, if it comes in that order and type.
        """
        a, of_a = self._summed(a, of_a, later | set(of_b))
        b, of_b = self._summed(b, of_b, later | set(of_a))
        shared = tuple(name for name in of_a if name in of_b)
        batch = tuple(name for name in shared if name in later)
        inner = tuple(name for name in shared if name not in later)
        rows, columns = (tuple(name for name in names if name not in shared) for names in (of_a, of_b))
        labels = (*batch, *rows, *columns)
        total = self._memory(labels, a.dtype, target)
        if not inner:
            views = [self._moved(x, names, labels) for x, names in ((a, of_a), (b, of_b))]
            self._steps.append(partial(np.multiply, *views, out=total))
            return total, labels
        left = self._stack(a, of_a, batch, rows, inner)
        right = self._stack(b, of_b, batch, inner, columns)
        stack = total.reshape(len(left), left.shape[1], right.shape[2])
        self._steps.append(self._owner.multiply(left, right, stack, batch, rows, columns))
        return total, labels

    def _memory(self, labels: Labels, dtype: np.dtype[Any], target: tuple[Array, Labels] | None) -> Array:
        if target is not None and target[1] == labels and target[0].dtype == dtype:
            return target[0]
        return self._owner.scratch([self._sizes[name] for name in labels], dtype)

    @staticmethod
    def _moved(x: Array, names: Labels, labels: Labels) -> Array:
        """A view with an axis for each of `labels`, of size 1 where `x` has none."""
        order = x.transpose([names.index(name) for name in labels if name in names])
        return order.reshape([x.shape[names.index(name)] if name in names else 1 for name in labels])

    def _stack(self, x: Array, names: Labels, batch: Labels, rows: Labels, columns: Labels) -> Array:
        """A stack of matrices with these rows and columns: a view where BLAS reads one, else a copy in every run."""
        moved = x.transpose([names.index(name) for name in (*batch, *rows, *columns)])
        shape = [prod(self._sizes[name] for name in part) for part in (batch, rows, columns)]
        if _folds(moved, [len(batch), len(rows), len(columns)]):
            stack = moved.reshape(shape)
            if stack.itemsize in stack.strides[1:]:
                return stack
        packed = self._owner.scratch(moved.shape, moved.dtype)
        self._steps.append(partial(np.copyto, packed, moved))
        return packed.reshape(shape)


def _folds(x: Array, counts: Sequence[int]) -> bool:
    """True when runs of `counts` axes of `x` can each become one axis of a view."""
    axes = iter(zip(x.shape, x.strides, strict=True))
    for count in counts:
        run = [next(axes) for _ in range(count)]
        run = [(size, stride) for size, stride in run if size != 1]
        if any(outer[1] != inner[0] * inner[1] for outer, inner in pairwise(run)):
            return False
    return True


@gradient_of("Einsum")
def einsum_gradient(request: GradientRequest) -> GradientOperators:
    """Of one operand: the equation with the output in its place. Raises GradientError for what needs more than that.

    That is an axis named twice in a term, an ellipsis, and an axis that only one operand has and the output has not. An
    axis of size 1 that is stretched is none of these, and its gradient would have the other size.
    """
    equation = request.arguments.string("equation", "")
    terms, output = parse(equation, request.label)
    operators = []
    for index in sorted(request.wanted):
        term = terms[index]
        others = [other for number, other in enumerate(terms) if number != index]
        repeats = any(len(set(one)) != len(one) for one in terms)
        if "." in equation or repeats or not set(term) <= set("".join([output, *others])):
            raise GradientError(f"{request.label}: equation {equation!r} has no gradient by input {index}")
        inputs = [request.dy(0), *(request.x(number) for number in range(len(terms)) if number != index)]
        turned = ",".join([output, *others]) + f"->{term}"
        operators.append(request.operator("Einsum", inputs, [request.dx(index)], equation=turned))
    return request.result(operators, {index: request.dx(index) for index in request.wanted})
