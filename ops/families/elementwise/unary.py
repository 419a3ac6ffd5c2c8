"""Unary arithmetic: element-wise operators, each an expression; their gradients follow from it.

Gradients that are an operator of their own are named as Caffe2's; others are made of operators that exist. Rounding and
signs are constant but for their steps, so they pass on no gradient.
"""

from __future__ import annotations

from typing import Any

from dagexec.core.dtypes import BOOL, FLOAT_TYPES, INT8, INT16, INT32, INT64, NUMBER_TYPES
from dagexec.core.expressions import Expression, apply, isnan, select, sqrt, square
from dagexec.core.gradient import gradient_by, no_gradient
from dagexec.core.onnx_name import OnnxName
from dagexec.ops.base.elementwise_operator import elementwise_operator

SIGNED_TYPES = (*FLOAT_TYPES, INT8, INT16, INT32, INT64)


def _define(name: str, kind: str, doc: str, *, onnx: int = 0, **options: Any) -> None:
    """Register a primitive as operator `name`; `onnx` is the version of the ONNX operator of that name."""

    def function(x: Expression) -> Expression:
        return apply(kind, x)

    function.__doc__, function.__module__ = doc, __name__
    elementwise_operator(name, onnx=OnnxName(name, onnx) if onnx else None, **options)(function)


_define("Exp", "exp", "Y = exp(X).", onnx=13, post_ops=["exp"])
_define("Log", "log", "Y = ln(X); NaN for negative X, minus infinity for 0.", onnx=13, post_ops=["log"])
_define("Sqrt", "sqrt", "Y = square root of X; NaN for negative X.", onnx=13, gradient=("Y", "dY"), post_ops=["sqrt"])
_define("Cbrt", "cbrt", "Y = cube root of X.", gradient=("dY", "Y"))
_define("Sqr", "square", "Y = X * X.", metas=SIGNED_TYPES, gradient=("X", "dY"), post_ops=["square"])
_define(
    "Abs", "absolute", "Y = |X|.", onnx=13, metas=NUMBER_TYPES, gradient=("X", "dY"), post_ops=["abs"], narrows=True
)
_define("Sign", "sign", "Y = -1, 0 or 1, as X is negative, zero or positive.", onnx=13, metas=NUMBER_TYPES)
_define("Floor", "floor", "Y = the largest integer that is at most X.", onnx=13)
_define("Ceil", "ceil", "Y = the least integer that is at least X.", onnx=13)
_define("Round", "rint", "Y = the integer next to X, of two equally near the even one.", onnx=22)
_define("Sin", "sin", "Y = sin(X), X in radians.", onnx=22, gradient=("X", "dY"))
_define("Cos", "cos", "Y = cos(X), X in radians.", onnx=22, gradient=("X", "dY"))
_define("Tan", "tan", "Y = tan(X), X in radians.", onnx=22, gradient=("X", "dY"))
_define("Asin", "arcsin", "Y = arcsine of X, in radians; NaN outside [-1, 1].", onnx=22, gradient=("X", "dY"))
_define("Acos", "arccos", "Y = arccosine of X, in radians; NaN outside [-1, 1].", onnx=22, gradient=("X", "dY"))
_define("Atan", "arctan", "Y = arctangent of X, in radians.", onnx=22, gradient=("X", "dY"))
_define("Sinh", "sinh", "Y = hyperbolic sine of X.", onnx=22, gradient=("dY", "X"))
_define("Cosh", "cosh", "Y = hyperbolic cosine of X.", onnx=22, gradient=("dY", "X"))
_define("Asinh", "arcsinh", "Y = inverse hyperbolic sine of X.", onnx=22, gradient=("X", "dY"))
_define("Acosh", "arccosh", "Y = inverse hyperbolic cosine of X; NaN below 1.", onnx=22, gradient=("X", "dY"))
_define("Atanh", "arctanh", "Y = inverse hyperbolic tangent of X; NaN outside [-1, 1].", onnx=22, gradient=("X", "dY"))
_define(
    "Erf",
    "erf",
    "Y = error function of X, 2/sqrt(pi) times the integral of exp(-t^2) from 0 to X.",
    onnx=13,
    gradient=("X", "dY"),
)
_define("Not", "logical_not", "Y = not X.", onnx=1, metas=(BOOL,))


@elementwise_operator("Negative", onnx=OnnxName("Neg", 13), metas=SIGNED_TYPES, post_ops=["linear:-1.0:0.0"])
def negative(x: Expression) -> Expression:
    """Y = -X."""
    return -x


@elementwise_operator("Scale", {"scale": "the factor (default 1)"})
def scaled(x: Expression, *, scale: float = 1.0) -> Expression:
    """Y = scale * X."""
    return x * scale


@elementwise_operator("Reciprocal", gradient=("Y", "dY"), onnx=OnnxName("Reciprocal", 13), post_ops=["pow:1.0:-1.0"])
def reciprocal(x: Expression) -> Expression:
    """Y = 1 / X; infinity for 0."""
    return 1 / x


@elementwise_operator("Rsqrt", gradient=("dY", "Y"), post_ops=["sqrt", "pow:1.0:-1.0"])
def rsqrt(x: Expression) -> Expression:
    """Y = 1 / square root of X; infinity for 0, NaN for negative X."""
    return 1 / sqrt(x)


@elementwise_operator("Cube", gradient=("dY", "X"), metas=SIGNED_TYPES, post_ops=["pow:1.0:3.0"])
def cube(x: Expression) -> Expression:
    """Y = X * X * X."""
    return square(x) * x


@elementwise_operator("ReplaceNaN", {"value": "what stands for NaN (default 0)"})
def replace_nan(x: Expression, *, value: float = 0.0) -> Expression:
    """Y = X, with `value` for NaN."""
    return select(isnan(x), value, x)


gradient_by("Exp", "Mul", ("dY", "Y"))
gradient_by("Log", "Div", ("dY", "X"))
gradient_by("Negative", "Negative", ("dY",))
gradient_by("Scale", "Scale", ("dY",))
no_gradient("Sign", "Floor", "Ceil", "Round", "Not", "ReplaceNaN")
