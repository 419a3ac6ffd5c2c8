"""Elementwise operators of several inputs: arithmetic, comparisons, logic, Sum, Mean, Max, Min and Where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, ClassVar

import numpy as np

from dagexec.core.arguments import Arguments
from dagexec.core.dtypes import BOOL, FLOAT_TYPES, INT32, INT64, NUMBER_TYPES, STRING, TypeMeta
from dagexec.core.expressions import Expression, element, square
from dagexec.core.expressions import power as to_power
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import declares, new_operator
from dagexec.core.rows import elementwise
from dagexec.core.schema import (
    UNBOUNDED,
    Formula,
    InplaceRule,
    OperatorCall,
    OpSchema,
    TensorType,
    any_to_first,
    first_to_first,
    no_inplace,
)
from dagexec.core.traits import ImageRole
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import Array, compute_dtype, convert, is_narrow
from dagexec.ops.base.broadcasting import BROADCAST_ARGS, broadcast_shape, operand_views, require_inplace_fits


class BinaryOperator(Operator):
    """Base of C = ufunc(A, B).

    Attributes:
        ufunc: the NumPy function.
    """

    ufunc: ClassVar[Callable[..., Any]]

    def prepare(self) -> Step:
        _, view = operand_views(self.call())
        return self.compute(self.x(0), self.x(1).reshape(view), self.y(0))

    def compute(self, a: Array, b: Array, c: Array) -> Step:
        """The step for operands that broadcast to `c` by NumPy's rule."""
        return partial(type(self).ufunc, a, b, out=c)


def arithmetic(post_op: str) -> dict[str, Any]:
    """The traits of an operator that joins its inputs by a binary post-op, one after another."""

    def rule(_arguments: Arguments, _meta: TypeMeta, count: int) -> list[str]:
        return [f"{post_op}:{index}" for index in range(1, count)]

    return {"post_ops": rule, "image_role": ImageRole.ELEMENTWISE, "narrows": True}


@declares
def binary_operator(
    name: str,
    doc: str,
    metas: tuple[TypeMeta, ...],
    inplace: InplaceRule,
    onnx: OnnxName | None,
    formula: Formula,
    *,
    boolean: bool = False,
    **traits: Any,
) -> OpSchema:
    """The schema of a binary operator on `metas`; the result is of the operands' type, or `boolean`."""

    def infer(call: OperatorCall) -> list[TensorType]:
        for index in (0, 1):
            call.require_types(index, *metas)
        meta = call.require_same_type()
        shape, _ = operand_views(call)
        output = TensorType(shape, BOOL if boolean else meta)
        require_inplace_fits(call, output)
        return [output]

    return OpSchema(
        name,
        infer=infer,
        doc=f"{doc} The operands broadcast as in NumPy, or by Caffe2's older rule with broadcast=1.",
        input_names=("A", "B"),
        output_names=("C",),
        args=BROADCAST_ARGS,
        inplace=inplace,
        onnx=() if onnx is None else (onnx,),
        formula=formula,
        **traits,
    )


def _define(
    name: str,
    ufunc: Callable[..., Any],
    doc: str,
    onnx: OnnxName | None,
    metas: tuple[TypeMeta, ...] = NUMBER_TYPES,
    inplace: InplaceRule = any_to_first,
    *,
    boolean: bool = False,
    **traits: Any,
) -> type[BinaryOperator]:
    """Register binary operator `name`, computed by one NumPy function."""
    members = {"ufunc": staticmethod(ufunc), "__doc__": doc, "__module__": __name__}
    cls = type(name, (BinaryOperator,), members)
    return binary_operator(name, doc, metas, inplace, onnx, ufunc, boolean=boolean, **traits)(cls)


COMPARABLE_TYPES = (*NUMBER_TYPES, BOOL, STRING)

Add = _define("Add", np.add, "C = A + B.", OnnxName("Add", 14), **arithmetic("add"))
Sub = _define("Sub", np.subtract, "C = A - B.", OnnxName("Sub", 14), **arithmetic("sub"))
Mul = _define("Mul", np.multiply, "C = A * B.", OnnxName("Mul", 14), **arithmetic("mul"))
EQ = _define("EQ", np.equal, "C = (A == B).", OnnxName("Equal", 19), COMPARABLE_TYPES, no_inplace, boolean=True)
NE = _define("NE", np.not_equal, "C = (A != B).", None, COMPARABLE_TYPES, no_inplace, boolean=True)
LT = _define("LT", np.less, "C = (A < B).", OnnxName("Less", 13), NUMBER_TYPES, no_inplace, boolean=True)
LE = _define("LE", np.less_equal, "C = (A <= B).", OnnxName("LessOrEqual", 16), NUMBER_TYPES, no_inplace, boolean=True)
GT = _define("GT", np.greater, "C = (A > B).", OnnxName("Greater", 13), NUMBER_TYPES, no_inplace, boolean=True)
GE = _define(
    "GE", np.greater_equal, "C = (A >= B).", OnnxName("GreaterOrEqual", 16), NUMBER_TYPES, no_inplace, boolean=True
)
And = _define("And", np.logical_and, "C = A and B.", OnnxName("And", 7), (BOOL,), first_to_first)
Or = _define("Or", np.logical_or, "C = A or B.", OnnxName("Or", 7), (BOOL,), first_to_first)
Xor = _define("Xor", np.logical_xor, "C = A xor B.", OnnxName("Xor", 7), (BOOL,), first_to_first)


@binary_operator(
    "Div",
    "C = A / B; of integers, rounded towards zero, and 0 for B = 0.",
    NUMBER_TYPES,
    first_to_first,
    OnnxName("Div", 14),
    np.divide,
    **arithmetic("div"),
)
class Div(BinaryOperator):
    """Quotient."""

    def compute(self, a: Array, b: Array, c: Array) -> Step:
        """A division; of signed integers, the remainder is taken off first, which makes it exact."""
        if c.dtype.kind not in "iu":
            return partial(np.divide, a, b, out=c)
        if c.dtype.kind == "u":
            return partial(np.floor_divide, a, b, out=c)
        exact = self.scratch(c.shape, c.dtype)
        passes = [
            partial(np.fmod, a, b, out=exact),
            partial(np.subtract, a, exact, out=exact),
            partial(np.floor_divide, exact, b, out=c),
        ]
        return in_sequence(passes)


def infer_pow(call: OperatorCall) -> list[TensorType]:
    """The output has the type of X, and the shape both operands broadcast to."""
    call.require_types(0, *(FLOAT_TYPES if len(call.inputs) == 1 else (*FLOAT_TYPES, INT32, INT64)))
    if ("exponent" in call.arguments) == (len(call.inputs) == 2):
        raise ArgumentError(f"{call.label}: the exponent must be given once, as argument 'exponent' or as input 1")
    if len(call.inputs) == 1:
        call.arguments.float("exponent", 1.0)
        return [call.inputs[0]]
    call.require_types(1, *NUMBER_TYPES)
    shape, _ = operand_views(call)
    output = TensorType(shape, call.inputs[0].meta)
    require_inplace_fits(call, output)
    return [output]


def power(x: Array, exponents: Array) -> Array:
    """Powers in float64, for tests: NumPy has none of integers by negative ones."""
    found: Array = np.power(np.asarray(x, np.float64), exponents)
    return found


def _pow_post_ops(arguments: Arguments, _meta: TypeMeta, count: int) -> list[str] | None:
    """By an argument; what an input says is known to a run only."""
    if count > 1:
        return None
    exponent = arguments.float("exponent", 1.0)
    return [{2.0: "square", 0.5: "sqrt"}.get(exponent, f"pow:1.0:{exponent!r}")]


def _pow_expression(call: OperatorCall) -> Expression | None:
    """By an input of one constant."""
    exponents = call.values[1] if len(call.inputs) == 2 else None
    if exponents is None or exponents.size != 1:
        return None
    exponent = float(exponents.reshape(-1)[0])
    return square(element(0)) if exponent == 2 else to_power(element(0), exponent)


@new_operator(
    "Pow",
    inputs=(1, 2),
    infer=infer_pow,
    doc="Y = X to the power of `exponent`, an argument or an input; that input may be of another numeric type. "
    "With it X may be of integers, of whose powers fractions are cut off.",
    input_names=("X", "exponent"),
    output_names=("Y",),
    args={"exponent": "the exponent, when there is no input for it", **BROADCAST_ARGS},
    inplace=any_to_first,
    onnx=(OnnxName("Pow", 15),),
    formula=power,
    expression=_pow_expression,
    post_ops=_pow_post_ops,
    image_role=ImageRole.ELEMENTWISE,
)
class Pow(Operator):
    """Power."""

    def prepare(self) -> Step:
        """One call; exponents 2, 1/2 and -1 have functions of their own, as in NumPy's `**`."""
        x, y = self.x(0), self.y(0)
        if len(self.input_blobs) == 2:
            _, view = operand_views(self.call())
            exponents = self.x(1).reshape(view)
            if y.dtype.kind == "i":
                return partial(integer_power, x, exponents, y)
            if y.dtype.kind == "V" and exponents.dtype != y.dtype:
                return partial(_bfloat16_power, x, exponents, y)
            return partial(np.power, x, exponents, out=y, dtype=y.dtype, casting="unsafe")
        exponent = self.arguments.float("exponent", 1.0)
        if exponent == 2:
            return partial(np.square, x, out=y)
        if exponent == 0.5:
            return partial(np.sqrt, x, out=y)
        if exponent == -1:
            return partial(np.divide, np.ones((), x.dtype), x, out=y)
        return partial(np.power, x, np.asarray(exponent, x.dtype), out=y)


def _bfloat16_power(x: Array, exponents: Array, y: Array) -> None:
    """The exponents become bfloat16 first, which NumPy's power does not do itself."""
    np.power(x, exponents.astype(y.dtype), out=y)


def integer_power(x: Array, exponents: Array, y: Array) -> None:
    """y = x to the power of the exponents, cut off: exact for whole exponents, of which negative ones need fractions.

    Infinity and NaN become what the machine makes of them.
    """
    with np.errstate(all="ignore"):
        if exponents.dtype.kind not in "iu" or exponents.min(initial=0) < 0:
            found = np.power(x.astype(np.float64), exponents.astype(np.float64))
            np.copyto(y, found, casting="unsafe")
        else:
            np.power(x, exponents, out=y, dtype=y.dtype, casting="unsafe")


class VariadicOperator(Operator):
    """Base of Y = ufunc over all inputs, accumulated in list order.

    Attributes:
        ufunc: the NumPy function of two arrays.
        widen: accumulate 16-bit floats in float32.
    """

    ufunc: ClassVar[Callable[..., Any]]
    widen: ClassVar[bool] = False

    def prepare(self) -> Step:
        """One call for each input after the first."""
        y = self.y(0)
        first, *rest = (self.x(index) for index in range(len(self.input_blobs)))
        total = self.scratch(y.shape, compute_dtype(y.dtype)) if self._needs_accumulator(y) else y
        steps: list[Step] = []
        if not rest:
            steps = [] if first is y else [partial(np.copyto, total, first)]
        for other in rest:
            steps.append(partial(type(self).ufunc, first, other, out=total, dtype=total.dtype))
            first = total
        steps += self.finish(total, len(self.input_blobs))
        if total is not y:
            steps.append(convert(total, y))
        return in_sequence(steps)

    def _needs_accumulator(self, y: Array) -> bool:
        return self.widen and is_narrow(y.dtype) and len(self.input_blobs) > 1

    def finish(self, total: Array, count: int) -> list[Step]:
        """Passes on the accumulated result of `count` inputs."""
        return []


@declares
def variadic_operator(
    name: str,
    doc: str,
    metas: tuple[TypeMeta, ...],
    formula: Formula,
    args: Mapping[str, str] | None = None,
    **traits: Any,
) -> OpSchema:
    """The schema of a variadic operator on `metas`."""

    def infer(call: OperatorCall) -> list[TensorType]:
        for index in range(len(call.inputs)):
            call.require_types(index, *metas)
        meta = call.require_same_type()
        output = TensorType(broadcast_shape(call, [kind.shape for kind in call.inputs]), meta)
        require_inplace_fits(call, output)
        return [output]

    return OpSchema(
        name,
        inputs=(1, UNBOUNDED),
        infer=infer,
        doc=f"{doc} Inputs of different shapes broadcast as in NumPy.",
        input_names=("X1", "X2", "..."),
        output_names=("Y",),
        args=args or {},
        inplace=first_to_first,
        onnx=(OnnxName(name, 13),),
        formula=formula,
        **traits,
    )


SUM_ARGS = {"broadcast": "1: the inputs may have different shapes; read by gradients only (default 0)"}


@variadic_operator(
    "Sum", "Y = X1 + X2 + ..., added in that order.", NUMBER_TYPES, lambda *x: sum(x), SUM_ARGS, **arithmetic("add")
)
class Sum(VariadicOperator):
    """Sum of tensors."""

    ufunc = np.add
    widen = True


def _mean_post_ops(_arguments: Arguments, _meta: TypeMeta, count: int) -> list[str]:
    return [*(f"add:{index}" for index in range(1, count)), f"linear:{1 / count!r}:0.0"] if count > 1 else []


@variadic_operator(
    "Mean",
    "Y = (X1 + X2 + ...) / number of inputs.",
    FLOAT_TYPES,
    lambda *x: sum(x) / len(x),
    **arithmetic("add") | {"post_ops": _mean_post_ops},
)
class Mean(VariadicOperator):
    """Mean of tensors."""

    ufunc = np.add
    widen = True

    def finish(self, total: Array, count: int) -> list[Step]:
        """The division by the number of inputs."""
        return [] if count == 1 else [partial(np.divide, total, np.asarray(count, total.dtype), out=total)]


@variadic_operator(
    "Max",
    "Y = the maximum of X1, X2, ..., element by element; NaN where one of them is NaN.",
    NUMBER_TYPES,
    lambda *x: reduce(np.maximum, x),
    **arithmetic("max"),
)
class Max(VariadicOperator):
    """Maximum of tensors."""

    ufunc = np.maximum


@variadic_operator(
    "Min",
    "Y = the minimum of X1, X2, ..., element by element; NaN where one of them is NaN.",
    NUMBER_TYPES,
    lambda *x: reduce(np.minimum, x),
    **arithmetic("min"),
)
class Min(VariadicOperator):
    """Minimum of tensors."""

    ufunc = np.minimum


def where_condition_view(call: OperatorCall) -> tuple[int, ...]:
    """The shape under which C broadcasts; with broadcast_on_rows its one axis is X's first. Raises ShapeError."""
    condition, x = call.inputs[0].shape, call.inputs[1].shape
    if not call.arguments.bool("broadcast_on_rows"):
        return condition
    if len(condition) != 1 or not x or condition[0] != x[0]:
        raise call.fail(f"with broadcast_on_rows, C must have one axis, of X's {x[:1]} rows; found shape {condition}")
    return (condition[0], *(1,) * (len(x) - 1))


def infer_where(call: OperatorCall) -> list[TensorType]:
    """The output has the element type of X and Y, and the shape that all three broadcast to."""
    call.require_types(0, BOOL)
    meta = call.require_same_type(1, 2)
    return [TensorType(broadcast_shape(call, [where_condition_view(call), *(k.shape for k in call.inputs[1:])]), meta)]


@new_operator(
    "Where",
    infer=infer_where,
    doc="Z = X where C is true, else Y. All three broadcast as in NumPy.",
    input_names=("C", "X", "Y"),
    output_names=("Z",),
    args={"broadcast_on_rows": "1: C has an element for each row of X (default 0)"},
    onnx=(OnnxName("Where", 16),),
    rows=elementwise,
)
class Where(Operator):
    """Selection."""

    def prepare(self) -> Step:
        """Copy Y, then X where C is true."""
        condition, z = self.x(0).reshape(where_condition_view(self.call())), self.y(0)
        steps: Sequence[Step] = (
            partial(np.copyto, z, self.x(2)),
            partial(np.copyto, z, self.x(1), where=condition),
        )
        return in_sequence(steps)
