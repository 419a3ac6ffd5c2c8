"""Unary arithmetic on CUDA: a table of expressions."""

from __future__ import annotations

from dagexec.ops.cuda.base.pointwise import register_pointwise
from dagexec.ops.elementwise import unary as host

register_pointwise(
    host,
    {
        "Exp": "exp(x)",
        "Log": "log(x)",
        "Sqrt": "sqrt(x)",
        "Cbrt": "cbrt(x)",
        "Sqr": "times(x, x)",
        "Negative": "negated(x)",
        "Abs": "magnitude(x)",
        "Sign": "sign_of(x)",
        "Floor": "floor(x)",
        "Ceil": "ceil(x)",
        "Round": "rint(x)",
        "Sin": "sin(x)",
        "Cos": "cos(x)",
        "Tan": "tan(x)",
        "Asin": "asin(x)",
        "Acos": "acos(x)",
        "Atan": "atan(x)",
        "Sinh": "sinh(x)",
        "Cosh": "cosh(x)",
        "Not": "!x",
        "Scale": "scale * x",
        "Reciprocal": "A(1) / x",
        "Rsqrt": "A(1) / sqrt(x)",
        "Cube": "times(times(x, x), x)",
        "Erf": "erf(x)",
    },
)
