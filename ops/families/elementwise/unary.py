"""Unary arithmetic: pointwise operators named after a function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from dagexec.core.dtypes import BOOL, FLOAT_TYPES, INT8, INT16, INT32, INT64, NUMBER_TYPES, TypeMeta
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Step
from dagexec.ops.base.blocks import Array, Scratch
from dagexec.ops.base.error_function import erf, erf_passes
from dagexec.ops.base.pointwise import Pointwise, UfuncOperator, pointwise, scalar_pass

_EXACT = (np.sqrt, np.square, np.negative, np.absolute, np.sign, np.floor, np.ceil, np.rint, np.logical_not)
SIGNED_TYPES = (*FLOAT_TYPES, INT8, INT16, INT32, INT64)


def _define(
    name: str,
    ufunc: Callable[..., Any],
    doc: str,
    onnx: OnnxName | None = None,
    *,
    metas: tuple[TypeMeta, ...] = FLOAT_TYPES,
    flops: float = 10,
    **traits: Any,
) -> type[UfuncOperator]:
    """Register operator `name`, computed by one NumPy function, which is its formula, too.

    `traits` are further attributes of its schema, as `pointwise` takes them.

    A function of exact results works on any strides. Others have to see packed arrays: NumPy has loops of its own for
    them, which may round differently, and results must not depend on the layout.
    """
    exact = ufunc in _EXACT
    members = {"ufunc": staticmethod(ufunc), "reads_strided": exact, "writes_strided": exact}
    cls = type(name, (UfuncOperator,), {**members, "__doc__": doc, "__module__": __name__})
    return pointwise(name, doc, metas=metas, flops=flops, onnx=onnx, formula=ufunc, **traits)(cls)


Exp = _define("Exp", np.exp, "Y = exp(X).", OnnxName("Exp", 13), post_ops=["exp"])
Log = _define(
    "Log", np.log, "Y = ln(X); NaN for negative X, minus infinity for 0.", OnnxName("Log", 13), post_ops=["log"]
)
Sqrt = _define(
    "Sqrt", np.sqrt, "Y = square root of X; NaN for negative X.", OnnxName("Sqrt", 13), flops=4, post_ops=["sqrt"]
)
Cbrt = _define("Cbrt", np.cbrt, "Y = cube root of X.", flops=20)
Sqr = _define("Sqr", np.square, "Y = X * X.", metas=SIGNED_TYPES, flops=1, post_ops=["square"])
Negative = _define(
    "Negative", np.negative, "Y = -X.", OnnxName("Neg", 13), metas=SIGNED_TYPES, flops=1, post_ops=["linear:-1.0:0.0"]
)
Abs = _define(
    "Abs", np.absolute, "Y = |X|.", OnnxName("Abs", 13), metas=NUMBER_TYPES, flops=1, post_ops=["abs"], narrows=True
)
Sign = _define(
    "Sign",
    np.sign,
    "Y = -1, 0 or 1, as X is negative, zero or positive.",
    OnnxName("Sign", 13),
    metas=NUMBER_TYPES,
    flops=1,
)
Floor = _define("Floor", np.floor, "Y = the largest integer that is at most X.", OnnxName("Floor", 13), flops=1)
Ceil = _define("Ceil", np.ceil, "Y = the least integer that is at least X.", OnnxName("Ceil", 13), flops=1)
Round = _define(
    "Round", np.rint, "Y = the integer next to X, of two equally near the even one.", OnnxName("Round", 22), flops=1
)
Sin = _define("Sin", np.sin, "Y = sin(X), X in radians.", OnnxName("Sin", 22))
Cos = _define("Cos", np.cos, "Y = cos(X), X in radians.", OnnxName("Cos", 22))
Tan = _define("Tan", np.tan, "Y = tan(X), X in radians.", OnnxName("Tan", 22))
Asin = _define("Asin", np.arcsin, "Y = arcsine of X, in radians; NaN outside [-1, 1].", OnnxName("Asin", 22))
Acos = _define("Acos", np.arccos, "Y = arccosine of X, in radians; NaN outside [-1, 1].", OnnxName("Acos", 22))
Atan = _define("Atan", np.arctan, "Y = arctangent of X, in radians.", OnnxName("Atan", 22))
Sinh = _define("Sinh", np.sinh, "Y = hyperbolic sine of X.", OnnxName("Sinh", 22))
Cosh = _define("Cosh", np.cosh, "Y = hyperbolic cosine of X.", OnnxName("Cosh", 22))
Asinh = _define("Asinh", np.arcsinh, "Y = inverse hyperbolic sine of X.", OnnxName("Asinh", 22))
Acosh = _define("Acosh", np.arccosh, "Y = inverse hyperbolic cosine of X; NaN below 1.", OnnxName("Acosh", 22))
Atanh = _define("Atanh", np.arctanh, "Y = inverse hyperbolic tangent of X; NaN outside [-1, 1].", OnnxName("Atanh", 22))
Not = _define("Not", np.logical_not, "Y = not X.", OnnxName("Not", 1), metas=(BOOL,), flops=1)


@pointwise("Scale", "Y = scale * X.", {"scale": "the factor (default 1)"}, formula=lambda x, scale=1.0: scale * x)
class Scale(Pointwise):
    """Multiple."""

    constants = {"scale": 1.0}

    def passes(self, x: Array, y: Array, scratch: Scratch) -> list[Step]:
        return [scalar_pass(np.multiply, x, self.constant("scale"), y)]


@pointwise(
    "Reciprocal",
    "Y = 1 / X; infinity for 0.",
    onnx=OnnxName("Reciprocal", 13),
    formula=lambda x: 1 / x,
    post_ops=["pow:1.0:-1.0"],
)
class Reciprocal(Pointwise):
    """Reciprocal."""

    def passes(self, x: Array, y: Array, scratch: Scratch) -> list[Step]:
        """A division, which is faster than `np.reciprocal`."""
        return [partial(np.divide, np.ones((), x.dtype), x, out=y)]


@pointwise(
    "Rsqrt",
    "Y = 1 / square root of X; infinity for 0, NaN for negative X.",
    flops=5,
    formula=lambda x: 1 / np.sqrt(x),
    post_ops=["sqrt", "pow:1.0:-1.0"],
)
class Rsqrt(Pointwise):
    """Reciprocal square root."""

    def passes(self, x: Array, y: Array, scratch: Scratch) -> list[Step]:
        """Square root, then a division."""
        return [partial(np.sqrt, x, out=y), partial(np.divide, np.ones((), x.dtype), y, out=y)]


@pointwise("Cube", "Y = X * X * X.", metas=SIGNED_TYPES, flops=2, formula=lambda x: x * x * x, post_ops=["pow:1.0:3.0"])
class Cube(Pointwise):
    """Third power."""

    def passes(self, x: Array, y: Array, scratch: Scratch) -> list[Step]:
        square = scratch(0, x.shape)
        return [partial(np.square, x, out=square), partial(np.multiply, square, x, out=y)]


@pointwise(
    "Erf",
    "Y = error function of X, 2/sqrt(pi) times the integral of exp(-t^2) from 0 to X.",
    flops=40,
    onnx=OnnxName("Erf", 13),
    formula=erf,
)
class Erf(Pointwise):
    """Error function; see `error_function` for the method and its accuracy."""

    def passes(self, x: Array, y: Array, scratch: Scratch) -> list[Step]:
        return erf_passes(x, y, scratch(0, x.shape), scratch(1, x.shape), scratch(2, x.shape))
