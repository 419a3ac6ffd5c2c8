"""Elementwise operators of several inputs on CUDA: arithmetic, comparisons, logic, Sum, Mean, Max, Min and Where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from dagexec.core import dtypes
from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.devices.cuda.arrays import address
from dagexec.ops.base.blocks import compute_dtype
from dagexec.ops.base.broadcasting import operand_views
from dagexec.ops.engines.cuda.base.copy import copy_step
from dagexec.ops.engines.cuda.base.expressed import register
from dagexec.ops.engines.cuda.base.expression import computed_scalar, elementwise
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator
from dagexec.ops.families.elementwise.arithmetic import where_condition_view

MAX_INPUTS = 16
"""So many inputs a kernel reads at most."""


class BinaryExpression(CudaOperator):
    """Base of c from a and b.

    Attributes:
        code: assigns c.
    """

    code: ClassVar[str]

    def prepare(self) -> Step:
        _, view = operand_views(self.call())
        inputs = {"a": self.x(0), "b": self.x(1).reshape(view)}
        return elementwise(self, type(self).schema.type.lower(), inputs, {"c": self.y(0)}, self.code)


for _op_type, _code in {
    "Add": "plus(a, b)",
    "Sub": "minus(a, b)",
    "Mul": "times(a, b)",
    "Div": "quotient(a, b)",
    "EQ": "a == b",
    "NE": "a != b",
    "LT": "a < b",
    "LE": "a <= b",
    "GT": "a > b",
    "GE": "a >= b",
    "And": "a && b",
    "Or": "a || b",
    "Xor": "a != b",
}.items():
    register(_op_type, BinaryExpression, code=f"c = {_code};")


class Pow(CudaOperator):
    """Power."""

    def prepare(self) -> Step:
        """One kernel; an exponent that is an input is rounded to the type of the output first.

        Powers of integers are computed as double, exact up to 2^53.
        """
        x, outputs = self.x(0), {"y": self.y(0)}
        if len(self.input_blobs) == 2:
            _, view = operand_views(self.call())
            inputs = {"x": x, "exponent": self.x(1).reshape(view)}
            if x.dtype.kind == "i":
                return elementwise(self, "integer_power", inputs, outputs, "y = (A)pow((double)x, (double)exponent);")
            return elementwise(self, "power", inputs, outputs, "y = pow(x, stored(y_p, exponent));")
        exponent = float(np.asarray(self.arguments.float("exponent", 1.0)).astype(x.dtype))
        special = {2.0: "x * x", 0.5: "sqrt(x)", -1.0: "A(1) / x"}.get(exponent)
        if special is not None:
            return elementwise(self, "pow", {"x": x}, outputs, f"y = {special};")
        scalars = {"exponent": computed_scalar(x, exponent)}
        return elementwise(self, "pow", {"x": x}, outputs, "y = pow(x, exponent);", scalars)


class VariadicExpression(CudaOperator):
    """Base of y from any number of inputs, taken in list order; 16-bit floats are taken in float.

    Attributes:
        function: of what was taken and the next one.
        finish: what is done to the result, with their number `count`.
    """

    function: ClassVar[str]
    finish: ClassVar[str] = ""

    def prepare(self) -> Step:
        """One kernel, or one for each `MAX_INPUTS` inputs."""
        arrays = [self.x(index) for index in range(len(self.input_blobs))]
        return folded(self, arrays, self.y(0), self.function, self.finish)


def folded(
    operator: CudaOperator,
    arrays: Sequence[Array],
    y: Array,
    function: str,
    finish: str = "",
    divisor: int | None = None,
) -> Step:
    """The step `y = finish(function(function(x0, x1), x2) ...)` of arrays that broadcast to `y`.

    `finish` is C++ that changes `y`, with `divisor` (by default the number of arrays) as `count`. `y` may be one of the
    first two arrays.
    """
    name = type(operator).schema.type.lower()
    if len(arrays) == 1 and (not finish or divisor in (None, 1)):
        return nothing_to_do if address(arrays[0]) == address(y) else copy_step(y, arrays[0])
    narrow = compute_dtype(y.dtype) if dtypes.from_numpy(y.dtype).is_float else y.dtype
    pieces = [arrays[start : start + MAX_INPUTS] for start in range(0, len(arrays), MAX_INPUTS)]
    total = y if len(pieces) == 1 else operator.scratch(y.shape, narrow)
    steps: list[Step] = []
    for number, piece in enumerate(pieces):
        inputs = {f"x{index}": array for index, array in enumerate(piece)}
        if number:
            inputs = {"total": total, **inputs}
        taken, *rest = inputs
        for other in rest:
            taken = f"{function}({taken}, {other})"
        last = number == len(pieces) - 1
        code = f"y = {taken};" + (f" {finish}" if last and finish else "")
        count = computed_scalar(y, divisor or len(arrays))
        scalars = {"count": count} if last and finish else {}
        steps.append(elementwise(operator, name, inputs, {"y": y if last else total}, code, scalars))
    return in_sequence(steps)


register("Sum", VariadicExpression, function="plus")
register("Mean", VariadicExpression, function="plus", finish="y = y / count;")
register("Max", VariadicExpression, function="nan_max")
register("Min", VariadicExpression, function="nan_min")


class Where(CudaOperator):
    """Selection."""

    def prepare(self) -> Step:
        condition = self.x(0).reshape(where_condition_view(self.call()))
        inputs = {"x": self.x(1), "y": self.x(2), "chosen": condition}
        return elementwise(self, "where", inputs, {"z": self.y(0)}, "z = chosen ? x : y;")


register("Pow", Pow)
register("Where", Where)
